-- New sales: orders with unused keys, and their lines, come in.
insert into orders select * from new_orders;
insert into lineitem select * from new_lineitem;
