-- Important stock identification: Germany's parts whose stock is worth more than a share of the whole. The share is 0.0001 by scale factor,
-- and there are 10,000 suppliers by scale factor.
select ps_partkey, sum(ps_supplycost * ps_availqty) as worth
from partsupp
  join supplier on s_suppkey = ps_suppkey
  join nation on n_nationkey = s_nationkey
where n_name = 'GERMANY'
group by ps_partkey
having sum(ps_supplycost * ps_availqty) > (
  select sum(ps_supplycost * ps_availqty) / (select count(*) from supplier)
  from partsupp
    join supplier on s_suppkey = ps_suppkey
    join nation on n_nationkey = s_nationkey
  where n_name = 'GERMANY')
order by worth desc, ps_partkey;
