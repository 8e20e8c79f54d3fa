//! Amazon EC2, asked in this process: no other program, and no library of Amazon's.
//!
//! | question | file |
//! |---|---|
//! | How is EC2 asked, and when is it asked again? | `client.rs` |
//! | What do its errors mean? | `errors.rs` |
//! | What is asked for when an instance is made? | `launch.rs` |
//! | What can be rented, and for how much? | `offers.rs` |
//! | What do its answers say? | `answers.rs` |
//! | How is the disk of a pool kept? | `snapshots.rs` |

mod answers;
mod client;
mod errors;
mod launch;
mod offers;
mod snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use futures_util::future::BoxFuture;
use perigee_model::kept::SnapshotPrice;
use perigee_model::money::PRICE_AGE_S_DEFAULT;
use perigee_model::rental::{CLUSTER_TAG, Instance, NewInstance, Notice, Offer};

use crate::credentials::Source;
use crate::provider::{CloudError, CloudErrorKind, Provider, Snapshots};
use crate::time;
use crate::xml::Element;
pub use client::Waits;
use client::{Again, Client, Form};

/// Whom [`perigee_model::money::Price::source`] names for the prices of [`Settings`].
const SHOWN: &str = "providers.yaml";
/// Instances that EC2 lists on a page.
const PAGE: u32 = 500;

/// What an operator says of EC2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// As in `eu-central-1`.
    pub region: String,
    /// The address of the API, if it is not AWS's own.
    pub endpoint: Option<String>,
    /// Where the keys are.
    pub credentials: Source,
    /// The kinds that may be rented.
    pub kinds: Vec<String>,
    /// The zones that may be rented in; empty: all of the region, or all with a subnet.
    pub zones: BTreeSet<String>,
    /// The subnet in each zone; empty: EC2's default.
    pub subnets: BTreeMap<String, String>,
    /// The security groups of an instance; empty: EC2's default.
    pub security_groups: Vec<String>,
    /// The machine image of who names none.
    pub image: Option<String>,
    /// The name of the image's root disk; `None`: EC2 is asked.
    pub root_device: Option<String>,
    /// Millionths of a dollar for an hour of each kind on demand.
    pub prices: BTreeMap<String, NonZeroU64>,
    /// When `prices` held, in seconds since 1970.
    pub as_of_unix_s: u64,
    /// Millionths of a dollar for each GiB that leaves EC2.
    pub egress_per_gib_micros: Option<NonZeroU64>,
    /// Millionths of a dollar for each GiB and month of a disk.
    pub disk_per_gib_month_micros: Option<NonZeroU64>,
    /// How old its prices may be.
    pub price_age_max_s: u64,
    /// What a snapshot costs. Without a price none is made.
    pub snapshots: SnapshotPrice,
    /// How long EC2 is waited for.
    pub waits: Waits,
}

impl Settings {
    /// Those of a region with what else an operator may leave out.
    pub fn new(region: &str) -> Self {
        Self {
            region: region.to_owned(),
            endpoint: None,
            credentials: Source::Environment,
            kinds: Vec::new(),
            zones: BTreeSet::new(),
            subnets: BTreeMap::new(),
            security_groups: Vec::new(),
            image: None,
            root_device: None,
            prices: BTreeMap::new(),
            as_of_unix_s: 0,
            egress_per_gib_micros: None,
            disk_per_gib_month_micros: None,
            price_age_max_s: PRICE_AGE_S_DEFAULT,
            snapshots: SnapshotPrice::default(),
            waits: Waits::default(),
        }
    }

    fn has_zone(&self, zone: &str) -> bool {
        (self.zones.is_empty() || self.zones.contains(zone))
            && (self.subnets.is_empty() || self.subnets.contains_key(zone))
    }
}

/// EC2 in one region.
#[derive(Debug)]
pub struct Ec2 {
    name: String,
    client: Client,
    settings: Settings,
}

impl Ec2 {
    /// The provider of this name.
    ///
    /// # Errors
    /// Why the settings can't be used.
    pub fn new(name: &str, settings: Settings) -> Result<Self, String> {
        let (endpoint, credentials) = (settings.endpoint.as_deref(), settings.credentials.clone());
        let client = Client::new(&settings.region, endpoint, credentials, settings.waits)?;
        Ok(Self { name: name.to_owned(), client, settings })
    }

    async fn make(&self, new: &NewInstance) -> Result<Instance, CloudError> {
        let what = format!("can't rent a {} in {} from {}", new.kind, new.zone, self.name);
        let refused =
            |why: &str| CloudError::new(CloudErrorKind::Refused, format!("{what}: {why}"));
        if let Some(why) = launch::refused(new) {
            return Err(refused(&why));
        }
        let image = Some(new.image.as_str()).filter(|image| !image.is_empty());
        let image = image.or(self.settings.image.as_deref()).ok_or_else(|| {
            refused("no machine image is named: name one in providers.yaml (`image: ami-…`)")
        })?;
        let root_device = match new.disk_bytes {
            0 => None,
            _ => Some(self.root_device(&what, image).await?),
        };
        let form = launch::form(new, image, root_device.as_deref(), &self.settings);
        let answer = self.client.ask(&what, &form, Again::MakesTwo).await?;
        let mut made = answers::made(&answer);
        match (made.pop(), made.len()) {
            (Some(instance), 0) => Ok(instance),
            (_, others) => {
                let why = format!("EC2 has made {others} others, or says nothing of what it made");
                Err(CloudError::new(CloudErrorKind::Unclear, format!("{what}: {why}")))
            }
        }
    }

    /// The name of an image's root disk. Nothing was made yet if EC2 does not say it.
    async fn root_device(&self, what: &str, image: &str) -> Result<String, CloudError> {
        if let Some(root_device) = &self.settings.root_device {
            return Ok(root_device.clone());
        }
        let form = Form::new("DescribeImages", "imagesSet").with_list("ImageId", [image]);
        let answer = self.client.ask(what, &form, Again::Harmless).await?;
        answers::root_device(&answer).map(str::to_owned).ok_or_else(|| {
            let why = format!("EC2 does not say which disk the image {image} begins from");
            CloudError::new(CloudErrorKind::Refused, format!("{what}: {why}"))
        })
    }

    async fn all_of(&self, cluster: &str) -> Result<Vec<Instance>, CloudError> {
        let what = format!("can't list the instances at {}", self.name);
        let form = Form::new("DescribeInstances", "reservationSet")
            .with("MaxResults", PAGE)
            .filter(1, &format!("tag:{CLUSTER_TAG}"), [cluster]);
        let read = |page: &Element| Ok(answers::instances(page, cluster));
        let mut instances = self.client.pages(&what, &form, read).await?;
        // An instance may be on two pages when the list has changed meanwhile.
        instances.sort_by(|one, other| one.id.cmp(&other.id));
        instances.dedup_by(|one, other| one.id == other.id);
        Ok(instances)
    }

    async fn terminate(&self, instance: &str) -> Result<(), CloudError> {
        let what = format!("can't end {instance} at {}", self.name);
        let form = Form::new("TerminateInstances", "instancesSet");
        let form = form.with_list("InstanceId", [instance]);
        match self.client.ask(&what, &form, Again::Harmless).await {
            Err(failed) if failed.code == "InvalidInstanceID.NotFound" => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }

    async fn marked(&self, cluster: &str) -> Result<Vec<Notice>, CloudError> {
        let what = format!("can't ask {} for notices", self.name);
        let form = Form::new("DescribeSpotInstanceRequests", "spotInstanceRequestSet");
        let form = form.filter(1, &format!("tag:{CLUSTER_TAG}"), [cluster]);
        let now_unix_s = time::now_unix_s();
        self.client.pages(&what, &form, |page| answers::notices(page, now_unix_s)).await
    }
}

/// The quotas of vCPUs that hold for several families of kinds, by the letters with which a kind's name begins: "On-Demand Instance quotas" and "Spot
/// Instance quotas" in AWS's EC2 user guide. Each other family has one of its own. All of them hold for a region.
const SHARED_QUOTAS: [(&str, &[&str]); 2] = [
    ("standard", &["a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"]),
    ("g and vt", &["g", "gr", "vt"]),
];

/// The quota in which the vCPUs of a kind count; `None` if this is no name of a kind.
fn quota_of(kind: &str) -> Option<String> {
    let letters = kind.split(|c: char| !c.is_ascii_alphabetic()).next()?;
    let shared = SHARED_QUOTAS.iter().find(|(_, families)| families.contains(&letters));
    let name = shared.map_or(letters, |(name, _)| *name);
    (!name.is_empty()).then(|| name.to_owned())
}

impl Provider for Ec2 {
    fn name(&self) -> &str {
        &self.name
    }

    fn quota_of(&self, kind: &str) -> Option<String> {
        quota_of(kind)
    }

    fn price_age_max_s(&self) -> u64 {
        self.settings.price_age_max_s
    }

    fn offers(&self) -> BoxFuture<'_, Result<Vec<Offer>, CloudError>> {
        Box::pin(offers::ask(&self.client, &self.settings))
    }

    fn create<'a>(&'a self, new: &'a NewInstance) -> BoxFuture<'a, Result<Instance, CloudError>> {
        Box::pin(self.make(new))
    }

    fn list<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        Box::pin(self.all_of(cluster))
    }

    fn end<'a>(&'a self, instance: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(self.terminate(instance))
    }

    fn notices<'a>(&'a self, cluster: &'a str) -> BoxFuture<'a, Result<Vec<Notice>, CloudError>> {
        Box::pin(self.marked(cluster))
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn kinds_of_the_standard_families_share_a_quota_and_others_have_their_own() {
        let standard = ["c8i.2xlarge", "m7i.large", "t3.micro", "im4gn.large", "z1d.metal"];
        for kind in standard {
            assert_eq!(quota_of(kind).as_deref(), Some("standard"), "{kind}");
        }
        let of = |kind: &str| quota_of(kind).expect("a quota");
        assert_eq!((of("g6.xlarge"), of("vt1.3xlarge")), (of("gr6.4xlarge"), of("g4dn.xlarge")));
        let own = ["p5.48xlarge", "x2idn.metal", "inf2.xlarge", "dl1.24xlarge", "hpc7a.96xlarge"];
        let names: BTreeSet<String> = own.iter().map(|kind| of(kind)).collect();
        assert!(names.len() == own.len() && !names.contains("standard"), "{names:?}");
        assert_eq!(quota_of("8.large"), None);
    }

    /// A login page before the network, and a program that answers as EC2 does but for the list.
    #[tokio::test]
    async fn what_is_not_ec2s_answer_is_no_empty_list_and_no_end() {
        let keys = tempfile::NamedTempFile::new().expect("a file");
        let lines = "aws_access_key_id = a\naws_secret_access_key = b\n";
        std::fs::write(keys.path(), lines).expect("it is written");
        for page in ["<html/>", "<DescribeInstancesResponse/>"] {
            let router = axum::Router::new().fallback(async move || page);
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            tokio::spawn(async move { axum::serve(listener, router).await });
            let settings = Settings {
                endpoint: Some(format!("http://{address}")),
                credentials: Source::File(keys.path().to_owned()),
                waits: Waits { pause: Duration::from_millis(1), ..Waits::default() },
                ..Settings::new("a")
            };
            let ec2 = Ec2::new("amazon", settings).expect("a provider");
            let list = Provider::list(&ec2, "c1").await.map(drop);
            let notices = ec2.notices("c1").await.map(drop);
            for answer in [list, notices, ec2.end("i-1").await] {
                let error = answer.expect_err(page);
                assert_eq!(error.kind, CloudErrorKind::Unclear, "{page}: {error}");
                assert!(error.message.contains("as EC2 does"), "{page}: {error}");
            }
        }
    }
}
