-- Product type profit measure: profit with green parts, by nation and year.
select n_name as nation, extract(year from o_orderdate) as year,
  sum(l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity) as profit
from part
  join lineitem on l_partkey = p_partkey
  join partsupp on ps_partkey = l_partkey and ps_suppkey = l_suppkey
  join supplier on s_suppkey = l_suppkey
  join orders on o_orderkey = l_orderkey
  join nation on n_nationkey = s_nationkey
where p_name like '%green%'
group by n_name, extract(year from o_orderdate)
order by nation, year desc;
