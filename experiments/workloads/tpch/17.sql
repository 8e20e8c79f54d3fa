-- Small-quantity-order revenue: what would be lost by a year without small orders of one part in a medium box.
select sum(l_extendedprice) / 7.0 as by_year
from lineitem join part on p_partkey = l_partkey
where p_brand = 'Brand#23' and p_container = 'MED BOX'
  and l_quantity < (select 0.2 * avg(other.l_quantity) from lineitem as other where other.l_partkey = p_partkey);
