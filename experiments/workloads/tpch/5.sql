-- Local supplier volume: sales of 1994 within each nation of Asia.
select n_name, sum(l_extendedprice * (1 - l_discount)) as revenue
from region
  join nation on n_regionkey = r_regionkey
  join customer on c_nationkey = n_nationkey
  join orders on o_custkey = c_custkey
  join lineitem on l_orderkey = o_orderkey
  join supplier on s_suppkey = l_suppkey and s_nationkey = c_nationkey
where r_name = 'ASIA' and o_orderdate >= date '1994-01-01' and o_orderdate < date '1995-01-01'
group by n_name
order by revenue desc;
