#!/usr/bin/env bash
# How fast `sluice verify --deep` reads a sealed shard, beside fio reading the same file: io_uring, O_DIRECT, 1 MiB blocks, 32 in
# flight, in huge pages (from malloc, transparent), in turns. With codec none verify should keep up with the disk, with bf16 with the disk or the decoder, whichever is slower.
#   tests/bench/verify_ratio.sh SLUICE DIR [SIZE_MIB] [REPEATS] [CODEC]
set -euo pipefail
sluice=$1 dir=$2 mib=${3:-4096} repeats=${4:-5} codec=${5:-none}
command -v fio >/dev/null || { echo "SKIPPED: no fio" >&2; exit 77; }
"$sluice" bench store --dir "$dir" --bytes "${mib}MiB" --codec "$codec" --threads "$(nproc)" --keep >/dev/null
store=$(ls -d "$dir"/sluice-bench-* | tail -1)
trap 'rm -r "$store"' EXIT
shard=$store/shards/shard-000000.sls
fio_gb_s() {
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=r --filename="$shard" --rw=read --readonly --bs=1M --ioengine=io_uring --iodepth=32 --direct=1 --fixedbufs=1 \
      --registerfiles=1 --output-format=json 2>/dev/null |
    python3 -c 'import json,sys; t=sys.stdin.read(); j=json.loads(t[t.index("{"):])["jobs"][0]; print(j["read"]["bw_bytes"]/1e9)'
}
ours() {
  "$sluice" verify --deep --json "$store" |
    python3 -c 'import json,sys; j=json.load(sys.stdin); assert j["healthy"]; print(j["stored_bytes"]/j["seconds"]/1e9, j["raw_bytes"]/j["seconds"]/1e9)'
}
for ((i = 0; i < repeats; i++)); do
  read -r f < <(fio_gb_s); read -r o s < <(ours)
  echo "$f $o $s"
  echo "run $i: fio $f GB/s, verify $o GB/s of the file, $s GB/s of states" >&2
done | python3 -c '
import sys, statistics as st
r = [tuple(map(float, l.split())) for l in sys.stdin]
med = lambda k: st.median(x[k] for x in r)
print("fio read median %.2f best %.2f GB/s" % (med(0), max(x[0] for x in r)))
print("verify   median %.2f GB/s of the file, %.2f GB/s of states" % (med(1), med(2)))
print("verify / fio: median of pairs %.3f, medians %.3f, medians of states %.3f" % (st.median(x[1] / x[0] for x in r), med(1) / med(0), med(2) / med(0)))'
