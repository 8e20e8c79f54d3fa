//! Providers as a controller asks them: EC2 as moto plays it, with faults on the way, and programs.

mod ec2;
mod faults;
mod libcloud;
mod moto;
mod programs;

use perigee_model::rental::NewInstance;

/// What a controller asks for. Each test names what its provider knows.
fn new_instance(rental: &str) -> NewInstance {
    NewInstance {
        rental: rental.to_owned(),
        cluster: "c1".to_owned(),
        kind: "k".to_owned(),
        zone: "z".to_owned(),
        spot: false,
        max_per_hour_micros: None,
        kvm: false,
        image: "image".to_owned(),
        disk_bytes: 1 << 30,
        pool: None,
        user_data: "#!/bin/sh\necho join-token\n".to_owned(),
    }
}
