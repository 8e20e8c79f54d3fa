-- Suppliers who kept orders waiting: who in Saudi Arabia alone was late with an order of several suppliers.
select s_name, count(*) as waits
from supplier
  join nation on n_nationkey = s_nationkey
  join lineitem as late on late.l_suppkey = s_suppkey
  join orders on o_orderkey = late.l_orderkey
where n_name = 'SAUDI ARABIA' and o_orderstatus = 'F' and late.l_receiptdate > late.l_commitdate
  and exists (
    select 1 from lineitem as other
    where other.l_orderkey = late.l_orderkey and other.l_suppkey <> late.l_suppkey)
  and not exists (
    select 1 from lineitem as other
    where other.l_orderkey = late.l_orderkey and other.l_suppkey <> late.l_suppkey
      and other.l_receiptdate > other.l_commitdate)
group by s_name
order by waits desc, s_name
limit 100;
