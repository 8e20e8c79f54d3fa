#!/bin/sh
# rank.sh WORK COMMAND...: one process of a program. Writes beside its output what its VM uses meanwhile: seconds since boot, ticks that its
# CPU worked, waited for disks and rested, and kibibytes of its memory: all, free, and cached. The first and the last line are the
# program's begin and end.
#
# On the host itself, where $RANKS is a directory, each process has a directory of its own there.
set -u
work=$1
shift
rank=${OMPI_COMM_WORLD_RANK:-0}
export PYTHONDONTWRITEBYTECODE=1 PERIGEE_PROGRESS=/dev/null
where=/job
[ -z "${RANKS-}" ] || where=$RANKS/$rank
cd "$where" || exit 1
usage=$PERIGEE_OUTPUT/$work-usage-$rank

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

# Each program finds its data cold. The host's other programs keep their caches.
if [ -z "${RANKS-}" ]; then
    sync
    echo 3 >/proc/sys/vm/drop_caches
fi
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
