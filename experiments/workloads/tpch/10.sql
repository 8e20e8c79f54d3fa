-- Returned item reporting: the 20 customers of 1993's last quarter who have sent back most.
select c_custkey, c_name, sum(l_extendedprice * (1 - l_discount)) as revenue, c_acctbal, n_name, c_address, c_phone, c_comment
from customer
  join orders on o_custkey = c_custkey
  join lineitem on l_orderkey = o_orderkey
  join nation on n_nationkey = c_nationkey
where o_orderdate >= date '1993-10-01' and o_orderdate < date '1994-01-01' and l_returnflag = 'R'
group by c_custkey, c_name, c_acctbal, c_phone, n_name, c_address, c_comment
order by revenue desc
limit 20;
