#!/bin/sh
# Runs in the guest: starts the database of the data volume and asks it the queries, one after the other.
set -eu
progress() { echo "$1" >"$PERIGEE_PROGRESS"; }
as_postgres() { runuser -u postgres -- "$@"; }
bin=/usr/lib/postgresql/15/bin
queries=$(cat inputs/queries)
total=$(($(echo "$queries" | wc -w) + 1))
answers=$PERIGEE_OUTPUT/answers.txt

# Each query finds its tables cold, as it would where they are larger than the memory.
forget_tables() {
    find /data/pg/base -type f -size +1M -exec dd if={} iflag=nocache count=0 status=none \;
}

progress "0/$total start"
$bin/postgres --version >"$PERIGEE_OUTPUT/postgres.version"
uname -r >"$PERIGEE_OUTPUT/kernel.version"
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 300 -l /tmp/postgres.log start || {
    cat /tmp/postgres.log >&2
    exit 1
}

step=1
for query in $queries; do
    progress "$step/$total $query"
    forget_tables
    began=$(cut -d' ' -f1 /proc/uptime)
    echo "-- $query" >>"$answers"
    psql -U postgres -X -q -At -P null=NULL -v ON_ERROR_STOP=1 -f "inputs/$query.sql" >>"$answers"
    echo "$query: from $began to $(cut -d' ' -f1 /proc/uptime) s after boot"
    step=$((step + 1))
done
progress "$step/$total done"
# The volume is a clone that nobody needs any more.
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 60 -m immediate stop
