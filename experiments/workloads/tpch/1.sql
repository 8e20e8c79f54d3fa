-- Pricing summary report: what was billed, shipped and returned, of all lines shipped until 90 days before 1998-12-01.
select l_returnflag, l_linestatus,
  sum(l_quantity) as quantity,
  sum(l_extendedprice) as price,
  sum(l_extendedprice * (1 - l_discount)) as discounted,
  sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) as charged,
  avg(l_quantity) as quantity_mean,
  avg(l_extendedprice) as price_mean,
  avg(l_discount) as discount_mean,
  count(*) as lines
from lineitem
where l_shipdate <= date '1998-09-02'
group by l_returnflag, l_linestatus
order by l_returnflag, l_linestatus;
