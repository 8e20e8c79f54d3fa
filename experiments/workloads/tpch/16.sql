-- Parts and supplier relationship: how many suppliers without complaints sell parts of these kinds.
select p_brand, p_type, p_size, count(distinct ps_suppkey) as suppliers
from partsupp join part on p_partkey = ps_partkey
where p_brand <> 'Brand#45' and p_type not like 'MEDIUM POLISHED%' and p_size in (49, 14, 23, 45, 19, 3, 36, 9)
  and ps_suppkey not in (select s_suppkey from supplier where s_comment like '%Customer%Complaints%')
group by p_brand, p_type, p_size
order by suppliers desc, p_brand, p_type, p_size;
