#!/bin/sh
# Runs in the first VM, or on the host itself: starts each program of $WORKS in all VMs, one after the other. On the host $INPUTS, $MINE, $DATABASE
# and $PROCESSES say what is elsewhere there.
set -eu
inputs=${INPUTS:-/job/inputs} mine=${MINE:-/mine} database=${DATABASE:-/data/pg}
number=0
total=$(echo "$WORKS" | wc -w)

# measure WORK COMMAND...
measure() {
    echo "$number/$total $1" >"$PERIGEE_PROGRESS"
    number=$((number + 1))
    work=$1
    shift
    mpirun ${PROCESSES:+-n "$PROCESSES"} -x PERIGEE_OUTPUT sh "$inputs/rank.sh" "$work" "$@" >"$PERIGEE_OUTPUT/$work-found"
}

# HPA and PFP have a copy each, so that neither finds in a cache what the other one has read.
for work in $WORKS; do
    case $work in
    hpa | pfp) measure "$work" /usr/bin/python3 "$inputs/$work.py" "$mine/transactions-$work" --support "$SUPPORT" ;;
    blast) measure blast /usr/bin/python3 "$inputs/blast.py" "$mine/database.fa" "$mine/queries.fa" ;;
    tpch) measure tpch /usr/bin/python3 "$inputs/tpch/power.py" "$database" "$PERIGEE_OUTPUT" ;;
    esac
done
echo "$total/$total done" >"$PERIGEE_PROGRESS"
