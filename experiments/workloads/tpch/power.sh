#!/bin/sh
# power.sh DATABASE OUT: the power test of TPC-H (clause 5.3.3), as DBT-3 runs it: the first refresh function, the 22 queries in the order
# of stream 0, and the second refresh function, one after the other. Writes OUT/tpch-answers and OUT/tpch-times. Runs as root.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
database=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
bin=/usr/lib/postgresql/15/bin
as_postgres() { runuser -u postgres -- "$@"; }
query() { psql -h "$database" -U postgres -X -q -At -P null=NULL -v ON_ERROR_STOP=1 -f "$here/$1.sql"; }

# Each step finds its tables cold, as it would where they are larger than the memory.
forget_tables() {
    find "$database/base" -type f -size +256k -exec dd if={} iflag=nocache count=0 status=none \;
}

log=$(mktemp)
chown postgres "$log"
as_postgres $bin/pg_ctl -D "$database" -s -w -t 300 -l "$log" -o "-k '$database'" start || {
    cat "$log" >&2
    exit 1
}
: >"$out/tpch-answers"
: >"$out/tpch-times"
for step in $(cat "$here/order"); do
    forget_tables
    read -r began _ </proc/uptime
    echo "-- $step" >>"$out/tpch-answers"
    query "$step" >>"$out/tpch-answers"
    read -r ended _ </proc/uptime
    echo "$step $began $ended" >>"$out/tpch-times"
    case $step in
    refresh-*) query refreshed >>"$out/tpch-answers" ;;
    esac
done
# Nobody needs this database any more.
as_postgres $bin/pg_ctl -D "$database" -s -w -t 60 -m immediate stop
rm -f "$log"
