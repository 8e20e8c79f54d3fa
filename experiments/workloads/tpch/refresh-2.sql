-- Old sales: some of the oldest orders go, with their lines.
delete from lineitem where l_orderkey in (select old_key from old_orders);
delete from orders where o_orderkey in (select old_key from old_orders);
