-- Promotion effect: the part of September 1995's revenue that promotions made.
select 100.00 * sum(case when p_type like 'PROMO%' then l_extendedprice * (1 - l_discount) else 0 end)
  / sum(l_extendedprice * (1 - l_discount)) as share
from lineitem join part on p_partkey = l_partkey
where l_shipdate >= date '1995-09-01' and l_shipdate < date '1995-10-01';
