-- Volume shipping: what France and Germany have sold to each other, by year.
select seller.n_name as from_nation, buyer.n_name as to_nation, extract(year from l_shipdate) as year,
  sum(l_extendedprice * (1 - l_discount)) as revenue
from supplier
  join lineitem on l_suppkey = s_suppkey
  join orders on o_orderkey = l_orderkey
  join customer on c_custkey = o_custkey
  join nation as seller on seller.n_nationkey = s_nationkey
  join nation as buyer on buyer.n_nationkey = c_nationkey
where l_shipdate between date '1995-01-01' and date '1996-12-31'
  and ((seller.n_name = 'FRANCE' and buyer.n_name = 'GERMANY') or (seller.n_name = 'GERMANY' and buyer.n_name = 'FRANCE'))
group by seller.n_name, buyer.n_name, extract(year from l_shipdate)
order by from_nation, to_nation, year;
