#!/bin/sh
# load.sh TABLES TO: makes a PostgreSQL database in the directory TO of the *.tbl files in TABLES. Runs as root.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tables=$(cd "$1" && pwd)
to=$2
bin=/usr/lib/postgresql/15/bin
progress() { [ -z "${PERIGEE_PROGRESS-}" ] || echo "$1" >"$PERIGEE_PROGRESS"; }
as_postgres() { runuser -u postgres -- "$@"; }

progress "0/4 initdb"
install -d -o postgres -g postgres -m 700 "$to"
to=$(cd "$to" && pwd)
as_postgres $bin/initdb -D "$to" -A trust -E UTF8 --no-locale --no-sync >/dev/null
cat "$here/postgresql.conf" >>"$to/postgresql.conf"

# The settings of the load only: nothing needs to survive a crash before the last checkpoint.
log=$(mktemp)
chown postgres "$log"
as_postgres $bin/pg_ctl -D "$to" -s -w -t 120 -l "$log" \
    -o "-k '$to' -c fsync=off -c full_page_writes=off -c shared_buffers=64MB -c maintenance_work_mem=64MB" start || {
    cat "$log" >&2
    exit 1
}
# Rows of a table made in the same transaction are not logged, and frozen from the start.
progress "1/4 copy"
{
    echo "begin;"
    cat "$here/schema.sql"
    for table in region nation part supplier partsupp customer orders lineitem; do
        printf '%s\n' "\\copy $table from '$tables/$table.tbl' with (delimiter '|', freeze)"
    done
    # What the refresh functions bring and take away.
    echo "create table new_orders (like orders); create table new_lineitem (like lineitem); create table old_orders (old_key integer);"
    for table in new_orders new_lineitem old_orders; do
        printf '%s\n' "\\copy $table from '$tables/$table.tbl' with (delimiter '|', freeze)"
    done
    echo "commit;"
} | psql -h "$to" -U postgres -X -q -v ON_ERROR_STOP=1
progress "2/4 indexes"
psql -h "$to" -U postgres -X -q -v ON_ERROR_STOP=1 -f "$here/indexes.sql"
progress "3/4 checkpoint"
psql -h "$to" -U postgres -X -q -c checkpoint
as_postgres $bin/pg_ctl -D "$to" -s -w -t 120 -m fast stop
rm -f "$log"
sync
progress "4/4 loaded"
