-- Global sales opportunity: customers of seven countries with more money than most, who have ordered nothing.
select substr(c_phone, 1, 2) as country, count(*) as customers, sum(c_acctbal) as money
from customer
where substr(c_phone, 1, 2) in ('13', '31', '23', '29', '30', '18', '17')
  and c_acctbal > (
    select avg(c_acctbal) from customer
    where c_acctbal > 0.00 and substr(c_phone, 1, 2) in ('13', '31', '23', '29', '30', '18', '17'))
  and not exists (select 1 from orders where o_custkey = c_custkey)
group by substr(c_phone, 1, 2)
order by country;
