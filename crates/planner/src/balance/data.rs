//! What a VM without a job loses to the network between itself and its data: measured where it is, as a job's VM is measured (`network.rs`),
//! and predicted for other hosts in the ratio of the probes.

use perigee_model::{HostId, VolumeName};

use crate::facts::{Cluster, DiskFacts};
use crate::figures::Figures;
use crate::network::{added_s, lost_s, not_computing_s};
use crate::refused::Refused;

/// What a VM did at its host in some time.
#[derive(Debug, Clone)]
pub struct Waited {
    /// The time in seconds, above 0.
    pub wall_s: f64,
    /// The seconds for which its vCPUs ran, all together.
    pub vcpu_s: f64,
    /// Its vCPUs.
    pub cpus: u32,
    /// All disks that it needs, with what it did with them in this time.
    pub disks: Vec<DiskFacts>,
}

impl Waited {
    /// The share of the time that it lost to the network, 0 to 1.
    pub fn lost(&self) -> f64 {
        self.share(lost_s(&self.disks, self.wall_s, self.vcpu_s, self.cpus))
    }

    /// The share of the time that it would have lost at the other host, 0 to 1, when the volumes that come after it are there.
    ///
    /// # Errors
    /// [`Refused`] when a link is not measured.
    pub fn lost_at(
        &self,
        cluster: &Cluster,
        (here, there): (&HostId, &HostId),
        come: &[VolumeName],
    ) -> Result<f64, Refused> {
        let mut then = self.disks.clone();
        let that_come = then.iter_mut().filter(|disk| come.contains(&disk.volume));
        that_come.for_each(|disk| disk.home = there.clone());
        let added_s =
            |disks: &[DiskFacts], at| added_s(cluster, disks, at, &mut Figures::default());
        let (here_s, there_s) = (added_s(&self.disks, here)?, added_s(&then, there)?);
        let lost_s = self.lost() * self.wall_s;
        Ok(match here_s > 0.0 && lost_s > 0.0 {
            true => self.share(lost_s * there_s / here_s),
            // It leaves its data, and loses what the probes say.
            false => self.share(there_s),
        })
    }

    /// The share of the time that it would have lost at the other host to this volume alone, 0 to 1, until that comes after it.
    ///
    /// # Errors
    /// [`Refused`] when a link is not measured.
    pub fn lost_until_it_comes(
        &self,
        cluster: &Cluster,
        there: &HostId,
        volume: &VolumeName,
    ) -> Result<f64, Refused> {
        let disk = self.disks.iter().filter(|disk| disk.volume == *volume).cloned();
        let disk: Vec<DiskFacts> = disk.collect();
        Ok(self.share(added_s(cluster, &disk, there, &mut Figures::default())?))
    }

    /// A vCPU that ran has lost nothing.
    fn share(&self, lost_s: f64) -> f64 {
        let most_s = not_computing_s(self.wall_s, self.vcpu_s, self.cpus);
        if self.wall_s > 0.0 { (lost_s.min(most_s) / self.wall_s).clamp(0.0, 1.0) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{assert_close, cluster, disk, host_id, volume_name};

    /// In 10 s it has read the volume at cloud1 500 times over 16 ms, and one at home1 100 times.
    fn waited() -> Waited {
        let disks = vec![disk("far", "cloud1", 500, 1, true), disk("near", "home1", 100, 1, false)];
        Waited { wall_s: 10.0, vcpu_s: 0.5, cpus: 1, disks }
    }

    #[test]
    fn what_is_lost_here_is_not_lost_at_the_data_and_what_stays_here_is_lost_there() {
        let (waited, cluster) = (waited(), cluster());
        let [home1, home2, cloud1] = ["home1", "home2", "cloud1"].map(host_id);
        let lost_at = |to: &HostId, come: &[&str]| {
            let come: Vec<VolumeName> = come.iter().map(|name| volume_name(name)).collect();
            waited.lost_at(&cluster, (&home1, to), &come).expect("the links are measured")
        };
        // 500 times 16.2 ms.
        assert_close(waited.lost(), 0.81);
        assert_close(lost_at(&cloud1, &["near"]), 0.0);
        assert_close(lost_at(&cloud1, &[]), 0.162);
        assert_close(lost_at(&home1, &[]), 0.81);
        // What comes after it is read over the network until then.
        let until = waited.lost_until_it_comes(&cluster, &cloud1, &volume_name("near"));
        assert_close(until.expect("the link is measured"), 0.162);
        let back = Waited { disks: vec![disk("far", "cloud1", 500, 1, false)], ..waited.clone() };
        let back = back.lost_at(&cluster, (&cloud1, &home2), &[]);
        assert_close(back.expect("the link is measured"), 0.81);
    }

    #[test]
    fn a_vm_that_computes_all_the_time_loses_nothing() {
        let busy = Waited { vcpu_s: 10.0, ..waited() };
        assert_close(busy.lost(), 0.0);
        let lost = busy.lost_at(&cluster(), (&host_id("home1"), &host_id("cloud1")), &[]);
        assert_close(lost.expect("the links are measured"), 0.0);
    }

    #[test]
    fn a_link_that_is_not_measured_is_a_refusal() {
        let mut cluster = cluster();
        cluster.links.clear();
        let refused = waited().lost_at(&cluster, (&host_id("home1"), &host_id("cloud1")), &[]);
        assert!(matches!(refused, Err(Refused::LinkNotMeasured { .. })), "{refused:?}");
    }
}
