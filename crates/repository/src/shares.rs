//! Which paths other tenants may read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;

use perigee_model::data::FileShare;
use perigee_model::limits::FILE_SHARES;
use perigee_model::{Problem, TenantName};

use crate::path::DataPath;
use crate::space::lock;

type ByOwner = BTreeMap<TenantName, BTreeSet<FileShare>>;

/// What all tenants share. It is kept in one file, which is replaced at each change.
#[derive(Debug)]
pub struct Shares {
    file: PathBuf,
    shares: Mutex<ByOwner>,
}

impl Shares {
    /// # Errors
    /// If there is a file that can't be read.
    pub fn open(file: PathBuf) -> Result<Self, Problem> {
        let fault = |e: &dyn std::fmt::Display| {
            Problem::internal(format!("can't read {}", file.display()), e)
        };
        let shares = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| fault(&e))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => ByOwner::default(),
            Err(error) => return Err(fault(&error)),
        };
        Ok(Self { file, shares: Mutex::new(shares) })
    }

    /// What a tenant shares.
    pub fn of(&self, owner: &TenantName) -> Vec<FileShare> {
        lock(&self.shares).get(owner).into_iter().flatten().cloned().collect()
    }

    /// Who shares something with a tenant.
    pub fn owners_for(&self, reader: &TenantName) -> Vec<TenantName> {
        let shares = lock(&self.shares);
        let owners = shares.iter().filter(|(_, of)| of.iter().any(|share| share.with == *reader));
        owners.map(|(owner, _)| owner.clone()).collect()
    }

    /// Whether a tenant may read another one's path.
    pub fn allows(&self, owner: &TenantName, path: &DataPath, reader: &TenantName) -> bool {
        self.paths(owner, reader).iter().any(|shared| path.is_within(shared))
    }

    /// The names in a directory that lead to what is shared below it.
    pub fn names_below(
        &self,
        owner: &TenantName,
        directory: &DataPath,
        reader: &TenantName,
    ) -> BTreeSet<String> {
        let paths = self.paths(owner, reader);
        let below = paths.iter().filter(|shared| shared.is_within(directory));
        below.filter_map(|shared| shared.names().get(directory.names().len()).cloned()).collect()
    }

    fn paths(&self, owner: &TenantName, reader: &TenantName) -> Vec<DataPath> {
        let shares = lock(&self.shares);
        let of = shares.get(owner).into_iter().flatten();
        let with = of.filter(|share| share.with == *reader);
        with.filter_map(|share| DataPath::parse(&share.path).ok()).collect()
    }

    /// Shares a path, or ends that.
    ///
    /// # Errors
    /// `Conflict` if the tenant shares too much; `NotFound` if there is nothing to end.
    pub fn set(
        &self,
        owner: &TenantName,
        share: FileShare,
        is_shared: bool,
    ) -> Result<(), Problem> {
        let what = format!("can't change who may read repo://{owner}/{}", share.path);
        let mut shares = lock(&self.shares);
        let mut changed = shares.clone();
        let of = changed.entry(owner.clone()).or_default();
        if is_shared {
            of.insert(share);
            FILE_SHARES.check(of.len()).map_err(|e| Problem::conflict(&what, e))?;
        } else if !of.remove(&share) {
            let why = format!("it is not shared with {}", share.with);
            return Err(Problem::not_found(what, why));
        }
        self.save(&changed, &what)?;
        *shares = changed;
        Ok(())
    }

    /// Ends what is shared of a path and below it, because it has another name or is deleted: what gets the name later is
    /// not meant.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn end(&self, owner: &TenantName, path: &DataPath) -> Result<(), Problem> {
        let is_within = |share: &FileShare| {
            DataPath::parse(&share.path).is_ok_and(|shared| shared.is_within(path))
        };
        let mut shares = lock(&self.shares);
        if !shares.get(owner).is_some_and(|of| of.iter().any(is_within)) {
            return Ok(());
        }
        let mut changed = shares.clone();
        changed.get_mut(owner).into_iter().for_each(|of| of.retain(|share| !is_within(share)));
        changed.retain(|_, of| !of.is_empty());
        self.save(&changed, &format!("can't end the shares of repo://{owner}/{path}"))?;
        *shares = changed;
        Ok(())
    }

    /// Ends all that a tenant shares, and all that others share with it.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn forget(&self, tenant: &TenantName) -> Result<(), Problem> {
        let mut shares = lock(&self.shares);
        let mut changed = shares.clone();
        changed.remove(tenant);
        changed.values_mut().for_each(|of| of.retain(|share| share.with != *tenant));
        changed.retain(|_, of| !of.is_empty());
        if changed != *shares {
            self.save(&changed, &format!("can't end the shares of tenant {tenant}"))?;
            *shares = changed;
        }
        Ok(())
    }

    fn save(&self, shares: &ByOwner, what: &str) -> Result<(), Problem> {
        let text = serde_json::to_vec_pretty(shares).map_err(|e| Problem::internal(what, e))?;
        perigee_http::write_private(&self.file, &text)
    }
}
