-- Minimum cost supplier: who in Europe sells brass parts of size 15 at the lowest price there.
select s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
from part
  join partsupp on ps_partkey = p_partkey
  join supplier on s_suppkey = ps_suppkey
  join nation on n_nationkey = s_nationkey
  join region on r_regionkey = n_regionkey
where p_size = 15 and p_type like '%BRASS' and r_name = 'EUROPE'
  and ps_supplycost = (
    select min(other.ps_supplycost)
    from partsupp as other
      join supplier as seller on seller.s_suppkey = other.ps_suppkey
      join nation as home on home.n_nationkey = seller.s_nationkey
      join region as area on area.r_regionkey = home.n_regionkey
    where other.ps_partkey = p_partkey and area.r_name = 'EUROPE')
order by s_acctbal desc, n_name, s_name, p_partkey
limit 100;
