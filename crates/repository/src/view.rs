//! What one account may do with the files of which tenants. All doors go through here.
//!
//! | whose files | read | change |
//! |---|---|---|
//! | the account's own tenant | yes | if the account may write |
//! | another tenant, shared with the account's tenant | yes | no |
//! | another tenant | as if there were none | as if there were none |
//!
//! An admin reads and changes the files of every tenant.

use std::sync::Arc;

use perigee_model::data::{CutUpload, FileEntry, FileKind, FileList, FileShare};
use perigee_model::{Problem, ProblemKind, TenantName};

use crate::account::Account;
use crate::errors::missing;
use crate::listing::Directory;
use crate::path::{DataPath, Location};
use crate::properties::Property;
use crate::repository::Repository;
use crate::space::{HashTurn, Space};
use crate::transfer::{Reading, Writing};
use crate::upload::{Begin, Upload};

/// One account's view of the repository.
#[derive(Debug, Clone)]
pub struct View {
    pub(crate) repository: Arc<Repository>,
    account: Arc<Account>,
}

/// A directory that is read in pieces.
#[derive(Debug)]
pub enum Entries {
    /// One on the disk.
    Stored(Directory),
    /// What leads to files that the account may read. Taken once.
    Given(Vec<FileEntry>),
}

/// A directory that is on no disk.
fn given(name: &str) -> FileEntry {
    FileEntry {
        name: name.to_owned(),
        kind: FileKind::Directory,
        size_bytes: 0,
        modified_ms: 0,
        sha256: None,
    }
}

fn nowhere(verb: &str, tenant: &TenantName, path: &DataPath) -> Problem {
    missing(format!("can't {verb} repo://{tenant}/{path}"))
}

impl View {
    /// What this account sees.
    pub fn new(repository: Arc<Repository>, account: Account) -> Self {
        Self { repository, account: Arc::new(account) }
    }

    /// Whose view it is.
    pub fn account(&self) -> &Account {
        &self.account
    }

    fn is_own(&self, tenant: &TenantName) -> bool {
        self.account.is_admin || *tenant == self.account.tenant
    }

    fn space(&self, tenant: &TenantName, make: bool) -> Result<Option<Arc<Space>>, Problem> {
        let make = make || *tenant == self.account.tenant;
        let space = self.repository.space(tenant, make)?;
        if let Some(space) = space.as_ref().filter(|_| *tenant == self.account.tenant) {
            space.usage.set_quota(self.account.quota);
        }
        Ok(space)
    }

    fn to_read<'a>(
        &self,
        location: &'a Location,
        verb: &str,
    ) -> Result<(Arc<Space>, &'a DataPath), Problem> {
        let Location::In(tenant, path) = location else {
            return Err(Problem::conflict(format!("can't {verb} /"), "it is a directory"));
        };
        let shares = &self.repository.shares;
        let may_read = self.is_own(tenant) || shares.allows(tenant, path, &self.account.tenant);
        if may_read && let Some(space) = self.space(tenant, false)? {
            return Ok((space, path));
        }
        Err(nowhere(verb, tenant, path))
    }

    pub(crate) fn to_write<'a>(
        &self,
        location: &'a Location,
        verb: &str,
    ) -> Result<(Arc<Space>, &'a DataPath), Problem> {
        let Location::In(tenant, path) = location else {
            return Err(Problem::conflict(
                format!("can't {verb} a file in /"),
                "the directories there are those of the tenants",
            ));
        };
        let forbidden =
            |why| Problem::forbidden(format!("can't {verb} repo://{tenant}/{path}"), why);
        if !self.is_own(tenant) {
            let is_shared = self.repository.shares.allows(tenant, path, &self.account.tenant);
            return Err(match is_shared {
                true => forbidden("it is shared with your tenant to be read, not changed"),
                false => nowhere(verb, tenant, path),
            });
        }
        if !self.account.may_write {
            return Err(forbidden("you may only read"));
        }
        match self.space(tenant, true)? {
            Some(space) => Ok((space, path)),
            None => Err(nowhere(verb, tenant, path)),
        }
    }

    /// The directories that lead to what the account may read.
    fn given_in(&self, location: &Location) -> Option<Vec<FileEntry>> {
        let own = &self.account.tenant;
        let names: Vec<String> = match location {
            Location::Top => {
                let mut tenants = match self.account.is_admin {
                    true => self.repository.tenants(),
                    false => self.repository.shares.owners_for(own),
                };
                tenants.push(own.clone());
                tenants.sort();
                tenants.dedup();
                tenants.iter().map(ToString::to_string).collect()
            }
            Location::In(tenant, path) => {
                if self.is_own(tenant) || self.repository.shares.allows(tenant, path, own) {
                    return None;
                }
                let names = self.repository.shares.names_below(tenant, path, own);
                names.into_iter().collect()
            }
        };
        (!names.is_empty()).then(|| names.iter().map(|name| given(name)).collect())
    }

    /// Moves work with the disk off the async threads.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Self) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let view = self.clone();
        let places = self.repository.places(&self.account.tenant);
        let place = places.acquire_owned().await;
        let place = place.map_err(|e| Problem::internal("can't use the repository", e))?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            act(&view)
        })
        .await;
        done.map_err(|e| Problem::internal("can't use the repository", e))?
    }

    /// What is at a location.
    ///
    /// # Errors
    /// `NotFound` if there is nothing that the account may know of.
    pub async fn entry(&self, location: Location) -> Result<FileEntry, Problem> {
        self.blocking(move |view| match view.given_in(&location) {
            Some(_) => Ok(given(match &location {
                Location::Top => "",
                Location::In(tenant, path) => {
                    path.names().last().map_or(tenant.as_str(), String::as_str)
                }
            })),
            None => {
                let (space, path) = view.to_read(&location, "find")?;
                space.entry(path)
            }
        })
        .await
    }

    /// As [`View::entry`]. If there is no file, but an upload of it was cut: its size says where the client goes on
    /// ([`Space::resumes_at`]).
    ///
    /// # Errors
    /// As [`View::entry`].
    pub async fn entry_or_unfinished(&self, location: Location) -> Result<FileEntry, Problem> {
        let found = self.entry(location.clone()).await;
        let Err(problem) = found else { return found };
        let resumes_at = self.of_unfinished(location.clone(), Space::resumes_at).await;
        let Location::In(_, path) = &location else { return Err(problem) };
        match (resumes_at, path.names().last()) {
            (Some(size_bytes), Some(name)) => {
                Ok(FileEntry { kind: FileKind::File, size_bytes, ..given(name) })
            }
            _ => Err(problem),
        }
    }

    /// How many bytes there are of an upload that was cut.
    pub async fn unfinished_bytes(&self, location: Location) -> Option<u64> {
        self.of_unfinished(location, Space::unfinished_bytes).await
    }

    async fn of_unfinished(
        &self,
        location: Location,
        what: fn(&Space, &DataPath) -> Option<u64>,
    ) -> Option<u64> {
        let found = self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "find")?;
            Ok(what(&space, path))
        });
        found.await.ok().flatten()
    }

    /// A sorted page of a directory.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Conflict` if it is a file.
    pub async fn list(
        &self,
        location: Location,
        after: Option<String>,
        max: usize,
    ) -> Result<FileList, Problem> {
        self.blocking(move |view| {
            if let Some(entries) = view.given_in(&location) {
                return Ok(FileList { entries, after: None });
            }
            let (space, path) = view.to_read(&location, "list")?;
            space.list(path, after.as_deref(), max)
        })
        .await
    }

    /// Opens a directory, to read it in pieces.
    ///
    /// # Errors
    /// As [`View::list`].
    pub async fn directory(&self, location: Location) -> Result<Entries, Problem> {
        self.blocking(move |view| {
            if let Some(entries) = view.given_in(&location) {
                return Ok(Entries::Given(entries));
            }
            let (space, path) = view.to_read(&location, "list")?;
            space.directory(path).map(Entries::Stored)
        })
        .await
    }

    /// The next entries of a directory, which is given back; none at its end.
    ///
    /// # Errors
    /// `Internal` if the disk fails.
    pub async fn next(
        &self,
        mut entries: Entries,
        max: usize,
    ) -> Result<(Vec<FileEntry>, Entries), Problem> {
        self.blocking(move |_| match &mut entries {
            Entries::Given(given) => Ok((std::mem::take(given), entries)),
            Entries::Stored(directory) => {
                let next = directory.next(max);
                let next =
                    next.map_err(|e| crate::errors::problem("can't read a directory further", e))?;
                Ok((next, entries))
            }
        })
        .await
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Conflict` if it is a directory.
    pub async fn read(&self, location: Location) -> Result<Reading, Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_read(&location, "read")?;
            space.read(path).map(Reading::new)
        })
        .await
    }

    /// Begins to write a file. `make_above` makes the directories above it that do not exist.
    ///
    /// # Errors
    /// `NoSpace` if the quota has no room for another file, `NotFound` if the directory above does not exist.
    pub async fn write(
        &self,
        location: Location,
        how: Begin,
        make_above: bool,
    ) -> Result<Writing, Problem> {
        if how == Begin::Present {
            match self.read(location.clone()).await {
                Ok(mut reading) => {
                    let mut writing = self.begin(location, Begin::Once, make_above).await?;
                    writing.copy_from(&mut reading).await?;
                    writing.end_also_alone();
                    return Ok(writing);
                }
                Err(problem) if problem.kind == ProblemKind::NotFound => {}
                // A file that can't be read now is not replaced by an empty one.
                Err(problem) => return Err(problem),
            }
        }
        self.begin(location, how, make_above).await
    }

    async fn begin(
        &self,
        location: Location,
        how: Begin,
        make_above: bool,
    ) -> Result<Writing, Problem> {
        let at = match &how {
            Begin::Continue(at) => *at,
            Begin::Present => {
                self.of_unfinished(location.clone(), Space::resumes_at).await.unwrap_or(0)
            }
            Begin::Empty | Begin::Once => 0,
        };
        // What has arrived is hashed again.
        let _turn = if at == 0 { None } else { self.hash_turn(location.clone()).await };
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "write")?;
            if make_above {
                space.make_directories_above(path)?;
            } else if let Some((above, _)) = path.split() {
                space.directory(&above).map(drop)?;
            }
            // Refused now and not after all bytes were sent.
            if space.entry(path).is_ok_and(|entry| entry.is_directory()) {
                let what = format!("can't write repo:/{location}");
                return Err(Problem::conflict(what, "it is a directory"));
            }
            Upload::begin(&space, path, how).map(|upload| Writing::new(upload, how))
        })
        .await
    }

    /// The turn to hash a file of a tenant again; none if there is no such tenant.
    pub(crate) async fn hash_turn(&self, location: Location) -> Option<HashTurn> {
        let space = self.blocking(move |view| Ok(view.to_write(&location, "write")?.0)).await;
        Some(space.ok()?.hash_turn().await)
    }

    /// Copies a file, with what is noted about it. It is as old as it is said, or new.
    ///
    /// # Errors
    /// As [`View::read`] and [`View::write`].
    pub async fn copy(
        &self,
        from: Location,
        to: Location,
        modified_ms: Option<u64>,
    ) -> Result<(), Problem> {
        let noted = self.properties(from.clone()).await?;
        let mut reading = self.read(from).await?;
        let mut writing = self.begin(to, Begin::Once, false).await?;
        writing.copy_from(&mut reading).await?;
        writing.set_properties(noted).await?;
        if let Some(modified_ms) = modified_ms {
            writing.set_modified(modified_ms).await?;
        }
        writing.commit(reading.entry().sha256.clone()).await.map(drop)
    }

    /// What clients have noted about a file or a directory.
    ///
    /// # Errors
    /// As [`View::entry`].
    pub(crate) async fn properties(&self, location: Location) -> Result<Vec<Property>, Problem> {
        self.blocking(move |view| {
            if view.given_in(&location).is_some() {
                return Ok(Vec::new());
            }
            let (space, path) = view.to_read(&location, "find")?;
            space.properties(path)
        })
        .await
    }

    /// Changes what is noted about a file or a directory.
    ///
    /// # Errors
    /// As [`View::entry`], and `NoSpace` if it is too much.
    pub(crate) async fn change_properties(
        &self,
        location: Location,
        change: impl FnOnce(&mut Vec<Property>) + Send + 'static,
    ) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "note anything about")?;
            space.change_properties(path, change)
        })
        .await
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `Conflict` if the name is taken.
    pub async fn make_directory(&self, location: Location) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "make the directory")?;
            space.make_directory(path)
        })
        .await
    }

    /// Deletes a file, and what there is of an upload of it that was cut. One of both is enough.
    ///
    /// # Errors
    /// `NotFound` if there is neither, `Conflict` if it is a directory.
    pub async fn remove_file(&self, location: Location) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "delete")?;
            let removed = space.remove_file(path);
            if removed.as_ref().is_err_and(|problem| problem.kind != ProblemKind::NotFound) {
                return removed;
            }
            view.repository.end_shares(&space, path, &removed)?;
            if !view.drop_cut(&space, path) {
                removed?;
            }
            Ok(())
        })
        .await
    }

    /// Deletes an empty directory, and what there is of uploads to it that were cut.
    ///
    /// # Errors
    /// `Conflict` if it is not empty.
    pub async fn remove_directory(&self, location: Location) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "delete the directory")?;
            let removed = space.remove_directory(path);
            view.repository.end_shares(&space, path, &removed)?;
            removed?;
            view.drop_cut(&space, path);
            Ok(())
        })
        .await
    }

    /// Whether there was anything of uploads to this path and below it that were cut.
    fn drop_cut(&self, space: &Space, path: &DataPath) -> bool {
        let in_parts = self.repository.uploads.drop_cut(space.tenant(), path);
        space.drop_unfinished_within(path) || in_parts
    }

    /// The uploads to a path and below it that were cut, sorted by their paths.
    ///
    /// # Errors
    /// If the account may not write there.
    pub async fn cut_uploads(&self, location: Location) -> Result<Vec<CutUpload>, Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "list the uploads to")?;
            let mut all = space.unfinished_within(path);
            all.extend(view.repository.uploads.cut(space.tenant(), path));
            all.sort_by(|one, other| one.path.cmp(&other.path));
            Ok(all)
        })
        .await
    }

    /// What a client deletes: as [`View::entry`], or a file of which only an upload is there that was cut.
    ///
    /// # Errors
    /// As [`View::entry`].
    pub async fn entry_or_cut(&self, location: Location) -> Result<FileEntry, Problem> {
        let found = self.entry(location.clone()).await;
        let Err(problem) = found else { return found };
        let cut = self.cut_uploads(location.clone()).await.unwrap_or_default();
        let Location::In(_, path) = &location else { return Err(problem) };
        let of_it = cut.into_iter().find(|one| one.path == path.to_string());
        match (of_it, path.names().last()) {
            (Some(CutUpload { size_bytes, .. }), Some(name)) => {
                Ok(FileEntry { kind: FileKind::File, size_bytes, ..given(name) })
            }
            _ => Err(problem),
        }
    }

    /// Gives a file or a directory another name. With `replace`, a file takes the place of another file.
    ///
    /// # Errors
    /// `Conflict` if the name is taken.
    pub async fn rename(&self, from: Location, to: Location, replace: bool) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, old) = view.to_write(&from, "rename")?;
            let (other, new) = view.to_write(&to, "rename")?;
            if !Arc::ptr_eq(&space, &other) {
                let what = format!("can't rename repo:/{from} to repo:/{to}");
                return Err(Problem::conflict(what, "they are of two tenants")
                    .next("copy the file, and delete the old one"));
            }
            if old == new {
                return space.rename(old, new, replace);
            }
            let renamed = space.rename(old, new, replace);
            view.repository.end_shares(&space, old, &renamed)?;
            renamed
        })
        .await
    }

    /// Says when a file or a directory was last changed.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub async fn set_modified(&self, location: Location, modified_ms: u64) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "set the time of")?;
            space.set_modified(path, modified_ms)
        })
        .await
    }

    /// Whether a file may be written there, as far as rights go, and the directory above it.
    ///
    /// # Errors
    /// `Forbidden` if the account may not write there, `NotFound` if there is no such directory.
    pub(crate) async fn may_write(&self, location: Location) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "write")?;
            path.split().map_or(Ok(()), |(above, _)| space.directory(&above).map(drop))
        })
        .await
    }

    /// What a tenant shares.
    ///
    /// # Errors
    /// If it is not the account's own tenant.
    pub async fn shares(&self, location: Location) -> Result<Vec<FileShare>, Problem> {
        self.blocking(move |view| {
            let (space, _) = view.to_write(&location, "list the shares of")?;
            Ok(view.repository.shares.of(space.tenant()))
        })
        .await
    }

    /// Lets another tenant read a path, or ends that.
    ///
    /// # Errors
    /// `NotFound` if there is nothing at the path.
    pub async fn share(
        &self,
        location: Location,
        with: TenantName,
        is_shared: bool,
    ) -> Result<(), Problem> {
        self.blocking(move |view| {
            let (space, path) = view.to_write(&location, "share")?;
            if is_shared {
                space.entry(path)?;
            }
            let share = FileShare { path: path.to_string(), with };
            view.repository.shares.set(space.tenant(), share, is_shared)
        })
        .await
    }
}
