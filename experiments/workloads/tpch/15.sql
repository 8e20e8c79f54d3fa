-- Top supplier: who has sold most in the first quarter of 1996.
with revenue as materialized (
  select l_suppkey as supplier_no, sum(l_extendedprice * (1 - l_discount)) as total
  from lineitem
  where l_shipdate >= date '1996-01-01' and l_shipdate < date '1996-04-01'
  group by l_suppkey)
select s_suppkey, s_name, s_address, s_phone, total
from supplier join revenue on supplier_no = s_suppkey
where total = (select max(total) from revenue)
order by s_suppkey;
