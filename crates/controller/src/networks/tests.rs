use super::*;

fn subnet(text: &str) -> Subnet {
    text.parse().expect("addresses")
}

#[test]
fn an_address_is_not_given_again_soon() {
    let small = subnet("10.7.0.0/29");
    let mut taken = BTreeSet::new();
    assert_eq!(next_number(small, 0, &taken), Some(2));
    taken.insert(2);
    assert_eq!(next_number(small, 2, &taken), Some(3));
    taken.remove(&2);
    assert_eq!(next_number(small, 3, &taken), Some(4));
    taken.extend([3, 4, 5, 6]);
    assert_eq!(next_number(small, 6, &taken), Some(2), "after the last one the first");
    taken.insert(2);
    assert_eq!(next_number(small, 6, &taken), None);
}

#[test]
fn each_network_has_a_number_of_its_own() {
    assert_eq!(next_vni(0, &[].into()), 1);
    assert_eq!(next_vni(5, &[1].into()), 6, "what was deleted is not used again soon");
    assert_eq!(next_vni(u16::MAX, &[1, 2].into()), 3);
}
