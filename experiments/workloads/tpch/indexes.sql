-- Keys, foreign keys and one date: the specification allows these (clause 1.5).
create unique index region_key on region (r_regionkey);
create unique index nation_key on nation (n_nationkey);
create unique index part_key on part (p_partkey);
create unique index supplier_key on supplier (s_suppkey);
create unique index partsupp_key on partsupp (ps_partkey, ps_suppkey);
create unique index customer_key on customer (c_custkey);
create unique index orders_key on orders (o_orderkey);
create unique index lineitem_key on lineitem (l_orderkey, l_linenumber);
create index partsupp_supplier on partsupp (ps_suppkey);
create index orders_customer on orders (o_custkey);
create index lineitem_part on lineitem (l_partkey, l_suppkey);
create index lineitem_shipped on lineitem (l_shipdate);
analyze;
