//! Who asks, as a handler sees it, and what the names mean that they write.

use std::sync::{Arc, OnceLock};

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use perigee_http::{Failure, Peer};
use perigee_model::backup::BackupUser;
use perigee_model::ids::Owned;
use perigee_model::inputs::is_inputs_image;
use perigee_model::job::{Job, JobSpec, NewImage, NewVolume};
use perigee_model::network::NewNetwork;
use perigee_model::persistent_vm::NewVm;
use perigee_model::tenant::{
    Me, Role, SEPARATOR, User, is_nobodys, new_name, shared_image, tenant_of,
};
use perigee_model::vm::NetworkKind;
use perigee_model::volume::{UPLOAD_PREFIX, VolumeSource};
use perigee_model::{
    BackupName, ImageName, JobId, NetworkName, Problem, ProblemKind, ScheduleName, TenantName,
    UserName, VmId, VolumeName,
};

use crate::cluster::Cluster;
use crate::cluster::accounts::UsedToken;
use crate::hash::is_sha256;
use crate::records::{ImageRecord, image_key};
use crate::storage::volumes;
use crate::{jobs, vms};

const OTHER_NETWORK: &str =
    "use a network of your own (perigee network create), or leave `network` out";

/// A user, or somebody who may do everything without being one.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Whose things short names are.
    pub tenant: TenantName,
    pub user: Option<UserName>,
    pub role: Role,
    /// As the audit log names it.
    pub who: String,
    /// The token with which it asks, if it has one.
    pub token: Option<UsedToken>,
    /// The full name of what is made, for the audit log.
    pub thing: Arc<OnceLock<String>>,
}

/// What decides what a caller sees: to callers with the same rights every page and every list shows the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rights {
    tenant: TenantName,
    role: Role,
    /// Only a member does not see all that the tenant has.
    user: Option<UserName>,
}

impl From<User> for Caller {
    fn from(user: User) -> Self {
        Self {
            who: format!("{}/{}", user.tenant, user.name),
            tenant: user.tenant,
            user: Some(user.name),
            role: user.role,
            token: None,
            thing: Arc::default(),
        }
    }
}

impl Caller {
    /// Who has an operator's certificate, or uses the controller's unix socket.
    pub fn admin(peer: &Peer) -> Self {
        let (tenant, who) = (TenantName::default(), peer.to_string());
        Self { tenant, user: None, role: Role::Admin, who, token: None, thing: Arc::default() }
    }

    /// What the caller is told of itself at `/v1/me`.
    pub fn me(&self) -> Me {
        Me { tenant: self.tenant.clone(), user: self.user.clone(), role: self.role }
    }

    /// What decides what this caller sees.
    pub fn rights(&self) -> Rights {
        let user = self.user.clone().filter(|_| self.role == Role::Member);
        Rights { tenant: self.tenant.clone(), role: self.role, user }
    }

    /// Whether the caller may do what concerns all tenants.
    pub fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }

    fn meant(&self, text: &str) -> String {
        if self.is_admin() { TenantName::meant_by_admin(text) } else { self.tenant.meant(text) }
    }

    /// The full name of a thing that may be there.
    pub fn name<N: Owned>(&self, written: &N) -> Result<N, Problem> {
        let full = self.meant(written.full());
        N::named(full).map_err(|e| Problem::invalid("can't use a name", e))
    }

    /// The same, unless it is of a job that this caller does not see.
    ///
    /// # Errors
    /// That there is no such thing.
    pub async fn seen_name<N: Named>(&self, cluster: &Cluster, written: &N) -> Result<N, Problem> {
        let name = self.name(written)?;
        if self.role == Role::Member
            && let Some((job, unknown)) = name.of_job()
        {
            // Of a job that has not ended, the store need not be asked.
            if let Some(record) = cluster.index.job(&job) {
                return if self.sees_this_job(&record.job) { Ok(name) } else { Err(unknown) };
            }
            match jobs::any_record(cluster, &job).await {
                Ok(record) if !self.sees_this_job(&record.job) => return Err(unknown),
                Err(problem) if problem.kind != ProblemKind::NotFound => return Err(problem),
                _ => {}
            }
        }
        Ok(name)
    }

    /// The full name of a thing that is to be made.
    pub fn new_name<N: Owned>(&self, cluster: &Cluster, written: &N) -> Result<N, Problem> {
        let full: N = new_name(self.meant(written.full()))?;
        check_tenant(cluster, full.full())?;
        self.did(full.full());
        Ok(full)
    }

    /// Notes the full name of what was made for the audit log.
    pub fn did(&self, full: &str) {
        // The first name is the one that counts.
        let _ = self.thing.set(full.to_owned());
    }

    /// The image to use: the own tenant's, or else a shared one.
    pub async fn image(
        &self,
        cluster: &Cluster,
        written: &ImageName,
    ) -> Result<ImageName, Problem> {
        let own = self.name(written)?;
        let Some(shared) = shared_image(&own).filter(|_| !self.is_admin()) else { return Ok(own) };
        let read =
            async |name: &ImageName| cluster.records.read::<ImageRecord>(&image_key(name)).await;
        if read(&own).await?.is_some() {
            return Ok(own);
        }
        let is_shared = read(&shared).await?.is_some_and(|record| record.shared);
        Ok(if is_shared { shared } else { own })
    }

    /// The volume to make, with full names. Its source has to be one that the caller sees.
    ///
    /// # Errors
    /// `Forbidden` for another host's export, unless an admin asks; `Invalid` for a name that nothing can have.
    pub async fn new_volume(
        &self,
        cluster: &Cluster,
        new: NewVolume,
    ) -> Result<NewVolume, Problem> {
        let name: VolumeName = self.new_name(cluster, &new.name)?;
        let source = match new.source {
            VolumeSource::Empty => VolumeSource::Empty,
            VolumeSource::Image(image) => VolumeSource::Image(self.image(cluster, &image).await?),
            VolumeSource::Volume(volume) => {
                VolumeSource::Volume(self.seen_name(cluster, &volume).await?)
            }
            remote @ VolumeSource::Remote { .. } if self.is_admin() => remote,
            VolumeSource::Remote { .. } => {
                let why = "only an admin may make a volume of another host's export";
                return Err(Problem::forbidden(format!("can't create volume {name}"), why));
            }
        };
        Ok(NewVolume { name, source, ..new })
    }

    /// Whether this caller may delete an image, or change where it may be: a shared one is all tenants'.
    ///
    /// # Errors
    /// `Forbidden` for whoever is no admin.
    pub async fn check_shared(&self, cluster: &Cluster, image: &ImageName) -> Result<(), Problem> {
        let record = cluster.records.read::<ImageRecord>(&image_key(image)).await?;
        if self.is_admin() || !record.is_some_and(|record| record.shared) {
            return Ok(());
        }
        let why = "it is shared with all tenants, so only an admin may";
        Err(Problem::forbidden(format!("can't change image {image}"), why))
    }

    /// The full name of an image that somebody makes. Those of jobs' inputs stand for their content.
    pub fn new_image_name(
        &self,
        cluster: &Cluster,
        written: &ImageName,
    ) -> Result<ImageName, Problem> {
        let name: ImageName = self.new_name(cluster, written)?;
        let short = name.as_str().rsplit(SEPARATOR).next().unwrap_or_default();
        if is_inputs_image(short) {
            let why = "images with such a name are made of jobs' inputs";
            return Err(Problem::invalid(format!("can't make image {name}"), why)
                .next("choose another name"));
        }
        Ok(name)
    }

    /// The image to import, with its full name.
    ///
    /// # Errors
    /// `Forbidden` for a file of a host, unless an admin asks or the file is an upload; `Invalid` for a name that
    /// nothing can have.
    pub fn new_image(&self, cluster: &Cluster, new: NewImage) -> Result<NewImage, Problem> {
        let name = self.new_image_name(cluster, &new.name)?;
        if !self.is_admin() && !new.source.starts_with(UPLOAD_PREFIX) {
            let why = "only an admin may import a file of a host";
            return Err(Problem::forbidden(format!("can't import image {name}"), why)
                .next("send the file there: perigee image import, without --on-host"));
        }
        Ok(NewImage { name, ..new })
    }

    /// The job with full names, and the user as its owner.
    pub async fn job(&self, cluster: &Cluster, spec: JobSpec) -> Result<JobSpec, Problem> {
        let name = self.meant(&spec.name);
        if spec.inputs.as_ref().is_some_and(|inputs| !is_sha256(inputs)) {
            let why = "inputs: it is not the SHA-256 of a list of inputs";
            return Err(Problem::invalid(format!("job {name}"), why));
        }
        if is_nobodys(&name) {
            // The same words as for all other names.
            new_name::<JobId>(name.clone())?;
        }
        check_tenant(cluster, &name)?;
        let network = self
            .network(spec.network)
            .map_err(|why| Problem::forbidden(format!("job {name}"), why).next(OTHER_NETWORK))??;
        let image = self.image(cluster, &spec.image).await?;
        let mut volumes = spec.volumes;
        for volume in &mut volumes {
            volume.volume = self.seen_name(cluster, &volume.volume).await?;
        }
        let owner = self.user.as_ref().map_or(spec.owner, ToString::to_string);
        Ok(JobSpec { name, image, volumes, owner, network, ..spec })
    }

    /// The network with its full name; the outer error says why this caller may not ask for it.
    fn network(&self, network: NetworkKind) -> Result<Result<NetworkKind, Problem>, &'static str> {
        match network {
            // Whoever is in it is in the operator's own network.
            NetworkKind::Bridge(_) if !self.is_admin() => Err(
                "only an admin may ask for a bridge, because it is a network of the hosts' operator",
            ),
            NetworkKind::Cluster(name) => Ok(self.name(&name).map(NetworkKind::Cluster)),
            other => Ok(Ok(other)),
        }
    }

    /// The network to make, with its full name.
    ///
    /// # Errors
    /// `Invalid` for a name that nothing can have.
    pub fn new_network(&self, cluster: &Cluster, new: NewNetwork) -> Result<NewNetwork, Problem> {
        Ok(NewNetwork { name: self.new_name(cluster, &new.name)?, ..new })
    }

    /// The VM with full names.
    pub async fn new_vm(&self, cluster: &Cluster, new: NewVm) -> Result<NewVm, Problem> {
        let name: VmId = self.new_name(cluster, &new.name)?;
        let image = self.image(cluster, &new.image).await?;
        let mut volumes = new.volumes;
        for volume in &mut volumes {
            volume.volume = self.seen_name(cluster, &volume.volume).await?;
        }
        let network = self.network(new.network).map_err(|why| {
            Problem::forbidden(format!("can't make VM {name}"), why).next(OTHER_NETWORK)
        })??;
        Ok(NewVm { name, image, volumes, network, ..new })
    }

    /// Whether a list that this caller asks for has the thing with this full name.
    pub fn sees(&self, full: &str) -> bool {
        self.is_admin() || self.tenant.owns(full)
    }

    /// For whom this caller has backups made; `None`: for nobody's tenant, as an admin.
    pub fn backup_user(&self) -> Option<BackupUser> {
        let user = self.user.clone().filter(|_| !self.is_admin())?;
        Some(BackupUser { tenant: self.tenant.clone(), user })
    }

    /// Whether this caller sees a backup, or a schedule of backups, that was made for this user. A VM has an owner, and a member sees what it has had made of its own VMs.
    pub fn sees_backup(&self, by: Option<&BackupUser>, is_of_vm: bool) -> bool {
        self.is_admin()
            || by.is_some_and(|by| {
                let is_own = self.user.as_ref() == Some(&by.user);
                self.tenant == by.tenant && (!is_of_vm || is_own || self.role > Role::Member)
            })
    }

    /// The same for a job or its VM. A member sees its own ones only.
    pub fn sees_job(&self, id: &str, owner: &str) -> bool {
        let is_own = self.user.as_ref().is_some_and(|user| user.as_str() == owner);
        self.sees(id) && (self.role > Role::Member || is_own)
    }

    /// As [`Self::sees_job`], for a job whose owner is in its spec.
    pub fn sees_this_job(&self, job: &Job) -> bool {
        self.sees_job(job.id.as_str(), &job.spec.owner)
    }

    /// Whether this caller may change the tokens and keys of a user: its own ones, or an admin those of all.
    ///
    /// # Errors
    /// That there is no such user, whether there is one or not.
    pub fn check_self(&self, tenant: &TenantName, user: &UserName) -> Result<(), Problem> {
        let is_own = self.tenant == *tenant && self.user.as_ref() == Some(user);
        if self.is_admin() || is_own {
            return Ok(());
        }
        Err(crate::cluster::accounts::unknown_user(tenant, user))
    }

    /// The token with which a user changes its own tokens and keys. What it makes ends with it.
    pub fn own_token(&self, tenant: &TenantName, user: &UserName) -> Option<&UsedToken> {
        let is_own = self.tenant == *tenant && self.user.as_ref() == Some(user);
        self.token.as_ref().filter(|_| is_own)
    }

    /// Whether this caller may see what a tenant may and does use.
    ///
    /// # Errors
    /// That there is no such tenant, whether there is one or not.
    pub fn check_tenant(&self, tenant: &TenantName) -> Result<(), Problem> {
        if self.is_admin() || self.tenant == *tenant {
            return Ok(());
        }
        Err(crate::cluster::accounts::unknown_tenant(tenant))
    }
}

/// Whether the tenant exists whose thing is to have this full name.
fn check_tenant(cluster: &Cluster, full: &str) -> Result<(), Problem> {
    let tenant = tenant_of(full);
    if cluster.accounts.has_tenant(tenant) {
        return Ok(());
    }
    let what = format!("can't use the name {full}");
    Err(Problem::invalid(what, format!("there is no tenant {tenant}"))
        .next("`perigee tenant list` shows the tenants"))
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| {
            let what = format!("{} {}", parts.method, parts.uri.path());
            Failure(Problem::forbidden(what, "only users may ask for this"))
        })
    }
}

/// A kind of thing whose name is in a path.
pub trait Named: Owned + Send + Sync {
    /// The job that it belongs to, and what is said if there is none; `None` for what belongs to the whole tenant.
    fn of_job(&self) -> Option<(JobId, Problem)> {
        None
    }
}

impl Named for VolumeName {
    /// A job's own disks are volumes while it runs.
    fn of_job(&self) -> Option<(JobId, Problem)> {
        jobs::job_of(self).map(|job| (job, volumes::unknown(self)))
    }
}

impl Named for BackupName {}

impl Named for ScheduleName {}

impl Named for ImageName {}

impl Named for NetworkName {}

impl Named for JobId {
    fn of_job(&self) -> Option<(JobId, Problem)> {
        Some((self.clone(), jobs::unknown(self)))
    }
}

impl Named for VmId {
    fn of_job(&self) -> Option<(JobId, Problem)> {
        JobId::new(self.as_str()).ok().map(|job| (job, vms::unknown(self)))
    }
}

/// The name in a path, as the full name that the caller means. Every handler gets names in this way, so that none can
/// forget whose they are.
#[derive(Debug)]
pub struct Full<N>(pub N);

impl<N: Named> FromRequestParts<Arc<Cluster>> for Full<N> {
    type Rejection = Failure;

    async fn from_request_parts(
        parts: &mut Parts,
        cluster: &Arc<Cluster>,
    ) -> Result<Self, Failure> {
        let invalid = |why: String| Failure(Problem::invalid("request path", why));
        let Path(text) = Path::<String>::from_request_parts(parts, cluster)
            .await
            .map_err(|e| invalid(e.body_text()))?;
        let caller = Caller::from_request_parts(parts, cluster).await?;
        Self::meant(cluster, &caller, text).await
    }
}

impl<N: Named> Full<N> {
    /// The full name that this caller means by a text in a path.
    ///
    /// # Errors
    /// `Invalid` for what is no name; that there is no such thing, if it is of a job that this caller does not see.
    pub async fn meant(cluster: &Cluster, caller: &Caller, text: String) -> Result<Self, Failure> {
        // What was written is checked first, so that an error shows it.
        let written =
            N::named(text).map_err(|e| Failure(Problem::invalid("request path", e.to_string())))?;
        Ok(Self(caller.seen_name(cluster, &written).await?))
    }
}
