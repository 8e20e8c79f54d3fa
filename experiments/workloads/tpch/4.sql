-- Order priority checking: orders of 1993's third quarter of which a line came late.
select o_orderpriority, count(*) as orders
from orders
where o_orderdate >= date '1993-07-01' and o_orderdate < date '1993-10-01'
  and exists (select 1 from lineitem where l_orderkey = o_orderkey and l_commitdate < l_receiptdate)
group by o_orderpriority
order by o_orderpriority;
