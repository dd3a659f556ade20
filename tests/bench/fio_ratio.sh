#!/usr/bin/env bash
# Writer throughput beside fio, back to back in one folder: io_uring, O_DIRECT, 1 MiB blocks, 32 in flight, registered buffers
# and files in both, a new file each time. Ours includes checksums, fdatasync a group, commit records and sealing; fio ends with one
# fsync. fio gets huge pages (from malloc, transparent), as our buffers have: from ordinary ones it is slower by nearly half.
#   tests/bench/fio_ratio.sh SLUICE DIR [SIZE_MIB] [REPEATS]
set -euo pipefail
sluice=$1 dir=$2 mib=${3:-4096} repeats=${4:-5}
command -v fio >/dev/null || { echo "SKIPPED: no fio" >&2; exit 77; }
fio_gb_s() {
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=w --filename="$dir/fio.tmp" --rw=write --bs=1M --size="${mib}M" --ioengine=io_uring --iodepth=32 --direct=1 \
      --fixedbufs=1 --registerfiles=1 --end_fsync=1 --unlink=1 --refill_buffers=0 --output-format=json 2>/dev/null |
    python3 -c 'import json,sys; t=sys.stdin.read(); j=json.loads(t[t.index("{"):])["jobs"][0]; print(j["write"]["bw_bytes"]/1e9, (j["usr_cpu"]+j["sys_cpu"])/100)'
}
ours() {
  "$sluice" bench store --dir "$dir" --bytes "${mib}MiB" |
    python3 -c 'import json,sys; j=json.load(sys.stdin); print(j["gb_s"], j["cpu_s_per_gb"])'
}
for ((i = 0; i < repeats; i++)); do
  read -r f fc < <(fio_gb_s); read -r o oc < <(ours)
  echo "$f $o $oc $fc"
  echo "run $i: fio $f GB/s, writer $o GB/s, $oc CPU s/GB" >&2
done | python3 -c '
import sys, statistics as st
r = [tuple(map(float, l.split())) for l in sys.stdin]
med = lambda k: st.median(x[k] for x in r)
best = lambda k: max(x[k] for x in r)
print("fio      median %.2f best %.2f GB/s" % (med(0), best(0)))
print("writer   median %.2f best %.2f GB/s, %.3f CPU s/GB" % (med(1), best(1), med(2)))
print("writer / fio: median of pairs %.3f, medians %.3f, best %.3f" % (st.median(x[1] / x[0] for x in r), med(1) / med(0), best(1) / best(0)))'
