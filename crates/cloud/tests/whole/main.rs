//! Providers as a controller asks them: EC2 as moto plays it, with faults on the way, and programs.

mod ec2;
mod faults;
mod libcloud;
mod moto;
mod programs;
