// Operand lists of wgmma m64nNk16 with N = 16 U: inline PTX wants every accumulator spelled out, for each U.
// L<U>: placeholders %0 .. %(8U-1);  O<U>: the matching "+f" constraints on float d[128].
#pragma once
#define L1  "%0, %1, %2, %3, %4, %5, %6, %7"
#define L2  L1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define L3  L2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define L4  L3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define L5  L4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define L6  L5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define L7  L6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define L8  L7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define L9  L8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define L10 L9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define L11 L10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define L12 L11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define L13 L12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define L14 L13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define L15 L14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define L16 L15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define F8(i)                                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define O1  F8(0)
#define O2  O1, F8(8)
#define O3  O2, F8(16)
#define O4  O3, F8(24)
#define O5  O4, F8(32)
#define O6  O5, F8(40)
#define O7  O6, F8(48)
#define O8  O7, F8(56)
#define O9  O8, F8(64)
#define O10 O9, F8(72)
#define O11 O10, F8(80)
#define O12 O11, F8(88)
#define O13 O12, F8(96)
#define O14 O13, F8(104)
#define O15 O14, F8(112)
#define O16 O15, F8(120)
