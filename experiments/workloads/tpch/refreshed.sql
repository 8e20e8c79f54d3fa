-- What a refresh function leaves, for the comparison.
select (select count(*) from orders), (select sum(o_totalprice) from orders), (select count(*) from lineitem),
  (select sum(l_extendedprice) from lineitem), (select sum(l_orderkey) from lineitem);
