-- National market share: Brazil's part of the sales of one type of steel in America, by year.
select extract(year from o_orderdate) as year,
  sum(case when seller.n_name = 'BRAZIL' then l_extendedprice * (1 - l_discount) else 0 end)
    / sum(l_extendedprice * (1 - l_discount)) as share
from part
  join lineitem on l_partkey = p_partkey
  join supplier on s_suppkey = l_suppkey
  join orders on o_orderkey = l_orderkey
  join customer on c_custkey = o_custkey
  join nation as buyer on buyer.n_nationkey = c_nationkey
  join region on r_regionkey = buyer.n_regionkey
  join nation as seller on seller.n_nationkey = s_nationkey
where r_name = 'AMERICA' and p_type = 'ECONOMY ANODIZED STEEL'
  and o_orderdate between date '1995-01-01' and date '1996-12-31'
group by extract(year from o_orderdate)
order by year;
