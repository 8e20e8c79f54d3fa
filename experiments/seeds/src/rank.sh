#!/bin/sh
# rank.sh WORK COMMAND...: one process of a program. Writes beside its output what its VM uses meanwhile: seconds since boot, ticks that its
# CPU worked, waited for disks and rested, and kibibytes of its memory: all, free, and cached. The first and the last line are the
# program's begin and end.
set -u
work=$1
shift
export PYTHONDONTWRITEBYTECODE=1 PERIGEE_PROGRESS=/dev/null
usage=$PERIGEE_OUTPUT/$work-usage-${OMPI_COMM_WORLD_RANK:-0}
cd /job

sample() {
    read -r up _ </proc/uptime
    read -r _ user nice system idle iowait irq softirq _ </proc/stat
    all=0 free=0 cached=0
    while read -r name value _; do
        case $name in
        MemTotal:) all=$value ;;
        MemFree:) free=$value ;;
        Buffers:) cached=$value ;;
        Cached:)
            cached=$((cached + value))
            break
            ;;
        esac
    done </proc/meminfo
    echo "$up $((user + nice + system + irq + softirq)) $iowait $idle $all $free $cached"
}

# Each program finds its data cold.
sync
echo 3 >/proc/sys/vm/drop_caches
sample >"$usage"
(
    while sleep 1; do sample; done
) >>"$usage" 2>/dev/null </dev/null &
sampler=$!
"$@"
code=$?
kill "$sampler"
wait "$sampler" 2>/dev/null
sample >>"$usage"
exit $code
