//! The queries: the text of the TPC-H specification with its validation parameters for PostgreSQL,
//! and the same query in SQLite's dialect over integers (`oracle.rs` says in which units).

/// A query of TPC-H, once for each of the two databases.
#[derive(Debug)]
pub struct Query {
    /// `Q6`
    pub name: &'static str,
    pub postgres: &'static str,
    pub sqlite: &'static str,
    /// SQLite's last column is multiplied by this power of ten.
    pub scale: u32,
}

/// Runs after the rows are loaded: an index on a key, which the specification allows, and statistics.
pub const LOADED_SQL: &str = "\
create index lineitem_partkey on lineitem (l_partkey);
analyze;
";

/// What the experiments ask, in the order in which they run.
pub const QUERIES: [Query; 4] = [Q6, Q17, Q14, Q12];

/// What the demo asks. Q17 looks rows up by an index, and each row waits for the one before it: no reading ahead helps. The
/// last two read a whole table.
pub const DEMO_QUERIES: [Query; 6] = [Q17, Q17_B, Q17_C, Q17_D, Q6, Q14];

/// Forecasting revenue change.
const Q6: Query = Query {
    name: "Q6",
    postgres: "\
select sum(l_extendedprice * l_discount) as revenue
from lineitem
where l_shipdate >= date '1994-01-01'
  and l_shipdate < date '1994-01-01' + interval '1' year
  and l_discount between 0.06 - 0.01 and 0.06 + 0.01
  and l_quantity < 24;
",
    sqlite: "\
select sum(l_price_cents * l_discount_percent) from lineitem
where l_shipdate between '1994-01-01' and '1994-12-31'
  and l_discount_percent in (5, 6, 7) and l_quantity < 24",
    scale: 4,
};

/// Shipping modes and order priority.
const Q12: Query = Query {
    name: "Q12",
    postgres: "\
select l_shipmode,
  sum(case when o_orderpriority = '1-URGENT' or o_orderpriority = '2-HIGH' then 1 else 0 end) as high_line_count,
  sum(case when o_orderpriority <> '1-URGENT' and o_orderpriority <> '2-HIGH' then 1 else 0 end) as low_line_count
from orders, lineitem
where o_orderkey = l_orderkey
  and l_shipmode in ('MAIL', 'SHIP')
  and l_commitdate < l_receiptdate
  and l_shipdate < l_commitdate
  and l_receiptdate >= date '1994-01-01'
  and l_receiptdate < date '1994-01-01' + interval '1' year
group by l_shipmode
order by l_shipmode;
",
    sqlite: "\
select l_shipmode,
  count(*) filter (where o_orderpriority in ('1-URGENT', '2-HIGH')),
  count(*) filter (where o_orderpriority not in ('1-URGENT', '2-HIGH'))
from lineitem join orders on o_orderkey = l_orderkey
where l_shipmode in ('MAIL', 'SHIP')
  and l_shipdate < l_commitdate and l_commitdate < l_receiptdate
  and l_receiptdate between '1994-01-01' and '1994-12-31'
group by 1 order by 1",
    scale: 0,
};

/// Promotion effect.
const Q14: Query = Query {
    name: "Q14",
    postgres: "\
select 100.00 * sum(case when p_type like 'PROMO%' then l_extendedprice * (1 - l_discount) else 0 end)
  / sum(l_extendedprice * (1 - l_discount)) as promo_revenue
from lineitem, part
where l_partkey = p_partkey
  and l_shipdate >= date '1995-09-01'
  and l_shipdate < date '1995-09-01' + interval '1' month;
",
    sqlite: "\
select 100.0 * sum(l_price_cents * (100 - l_discount_percent) * (p_type like 'PROMO%'))
  / sum(l_price_cents * (100 - l_discount_percent))
from lineitem join part on l_partkey = p_partkey
where l_shipdate between '1995-09-01' and '1995-09-30'",
    scale: 0,
};

/// Small-quantity-order revenue of the parts of one brand and container: the parameters that the specification lets change.
macro_rules! small_quantity_orders {
    ($name:literal, $brand:literal, $container:literal) => {
        Query {
            name: $name,
            postgres: concat!(
                "\
select sum(l_extendedprice) / 7.0 as avg_yearly
from lineitem, part
where p_partkey = l_partkey
  and p_brand = '",
                $brand,
                "'
  and p_container = '",
                $container,
                "'
  and l_quantity < (select 0.2 * avg(l_quantity) from lineitem where l_partkey = p_partkey);
"
            ),
            sqlite: concat!(
                "\
with wanted as (
  select p_partkey as partkey, sum(l_quantity) as quantity, count(*) as items
  from part join lineitem on p_partkey = l_partkey
  where p_brand = '",
                $brand,
                "' and p_container = '",
                $container,
                "' group by p_partkey)
select sum(l_price_cents) / 700.0 from wanted join lineitem on l_partkey = partkey
where 5 * l_quantity * items < quantity"
            ),
            scale: 0,
        }
    };
}

/// With the validation parameters.
const Q17: Query = small_quantity_orders!("Q17", "Brand#23", "MED BOX");
const Q17_B: Query = small_quantity_orders!("Q17b", "Brand#34", "LG CASE");
const Q17_C: Query = small_quantity_orders!("Q17c", "Brand#12", "SM PKG");
const Q17_D: Query = small_quantity_orders!("Q17d", "Brand#51", "JUMBO JAR");
