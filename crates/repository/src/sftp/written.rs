//! The files that a session writes.
//!
//! A file has no name in the tree until the last one who writes it closes it: others see what was there before. But the
//! session that writes it sees it as soon as it is open. Clients ask at once what it is, read it, set its time, give it
//! another name or delete it, before they close it: sshfs closes a file a moment after its program has.

use std::collections::BTreeMap;
use std::time::SystemTime;

use perigee_model::data::{FileEntry, FileKind};
use perigee_model::{Problem, ProblemKind};
use russh_sftp::protocol::OpenFlags;

use crate::errors::missing;
use crate::listing::unix_ms;
use crate::path::{DataPath, Location};
use crate::transfer::{Reading, Writing};
use crate::upload::Begin;
use crate::view::View;

#[derive(Debug)]
enum Content {
    /// What is in the tree: nothing was written yet.
    Stored(Reading),
    /// What has come.
    New(Writing),
}

/// One of them, and how many may still write it.
#[derive(Debug)]
pub struct File {
    at: Location,
    content: Content,
    writers: usize,
    /// When it was last changed, as the client says; and as it was.
    said_ms: Option<u64>,
    changed_ms: u64,
    is_deleted: bool,
}

fn now_ms() -> u64 {
    unix_ms(SystemTime::now())
}

fn taken(verb: &str, at: &Location) -> Problem {
    Problem::conflict(format!("can't {verb} repo:/{at}"), "it exists already")
}

impl File {
    /// Begins to write a file.
    async fn open(view: &View, at: Location, flags: OpenFlags) -> Result<Self, Problem> {
        let exists = view.entry(at.clone()).await.is_ok();
        if flags.contains(OpenFlags::EXCLUDE) && exists {
            return Err(taken("write", &at));
        }
        if !flags.contains(OpenFlags::CREATE) && !exists {
            // An upload that was cut is there for those who go on with it.
            view.entry_or_unfinished(at.clone()).await?;
        }
        let content = if flags.contains(OpenFlags::TRUNCATE) {
            Content::New(view.write(at.clone(), Begin::Empty, false).await?)
        } else if exists {
            view.may_write(at.clone()).await?;
            Content::Stored(view.read(at.clone()).await?)
        } else {
            Content::New(view.write(at.clone(), Begin::Present, false).await?)
        };
        let (said_ms, changed_ms, is_deleted) = (None, now_ms(), false);
        Ok(Self { at, content, writers: 1, said_ms, changed_ms, is_deleted })
    }

    /// Where the file is, or will be when it is closed.
    pub fn at(&self) -> &Location {
        &self.at
    }

    /// What it is for its session.
    pub fn entry(&self) -> FileEntry {
        match &self.content {
            Content::Stored(reading) => {
                let entry = reading.entry().clone();
                let modified_ms = self.said_ms.unwrap_or(entry.modified_ms);
                FileEntry { modified_ms, ..entry }
            }
            Content::New(writing) => FileEntry {
                name: name_of(&self.at).to_owned(),
                kind: FileKind::File,
                size_bytes: writing.length(),
                modified_ms: self.said_ms.unwrap_or(self.changed_ms),
                sha256: None,
            },
        }
    }

    /// At most `max` bytes; fewer at the end, and none beyond it. What the client has written is seen.
    pub async fn read(&mut self, offset: u64, max: usize) -> Result<Vec<u8>, Problem> {
        match &mut self.content {
            Content::Stored(reading) => Ok(reading.read(offset, max).await?.to_vec()),
            Content::New(writing) => writing.read(offset, max).await,
        }
    }

    /// From here on it differs from what is in the tree.
    async fn change(&mut self, view: &View, how: Begin) -> Result<&mut Writing, Problem> {
        if let Content::Stored(_) = self.content {
            self.content = Content::New(view.write(self.at.clone(), how, false).await?);
        }
        (self.said_ms, self.changed_ms) = (None, now_ms());
        match &mut self.content {
            Content::New(writing) => Ok(writing),
            Content::Stored(_) => Err(missing("can't write a file")),
        }
    }

    /// From the first write on, the file is a new one, which takes the place of the old one when it is closed.
    pub async fn write(&mut self, view: &View, offset: u64, data: &[u8]) -> Result<(), Problem> {
        self.change(view, Begin::Present).await?.write(offset, data).await
    }

    /// Cuts the file, or extends it with zeros.
    pub async fn set_length(&mut self, view: &View, length: u64) -> Result<(), Problem> {
        let how = if length == 0 { Begin::Empty } else { Begin::Present };
        self.change(view, how).await?.set_length(length).await
    }

    /// The time that the file gets when it is closed.
    pub fn set_modified(&mut self, modified_ms: u64) {
        self.said_ms = Some(modified_ms);
    }

    /// It has no name any more, and will have none.
    async fn delete(&mut self) -> Result<(), Problem> {
        self.is_deleted = true;
        match &mut self.content {
            Content::New(writing) => writing.end_resuming().await,
            Content::Stored(_) => Ok(()),
        }
    }

    async fn move_to(&mut self, at: Location) -> Result<(), Problem> {
        if let (Content::New(writing), Location::In(_, path)) = (&mut self.content, &at) {
            writing.move_to(path.clone()).await?;
        }
        self.at = at;
        Ok(())
    }

    /// It gets its name. Whether there was anything to do.
    async fn end(self, view: &View) -> Result<bool, Problem> {
        match (self.content, self.said_ms) {
            _ if self.is_deleted => Ok(false),
            (Content::New(mut writing), said_ms) => {
                if let Some(said_ms) = said_ms {
                    writing.set_modified(said_ms).await?;
                }
                writing.commit(None).await.map(|_| true)
            }
            (Content::Stored(_), Some(said_ms)) => {
                view.set_modified(self.at, said_ms).await.map(|()| true)
            }
            (Content::Stored(_), None) => Ok(false),
        }
    }
}

/// The last name of a path.
pub fn name_of(at: &Location) -> &str {
    match at {
        Location::In(_, path) => path.names().last().map_or("", String::as_str),
        Location::Top => "",
    }
}

/// What of a path is below another one.
fn below<'a>(at: &'a Location, top: &Location) -> Option<&'a [String]> {
    match (at, top) {
        (Location::In(tenant, path), Location::In(of, above)) if tenant == of => {
            path.names().strip_prefix(above.names())
        }
        _ => None,
    }
}

/// The files that a session writes, by numbers of their own.
#[derive(Debug, Default)]
pub struct Files {
    files: BTreeMap<u64, File>,
    next: u64,
}

impl Files {
    /// Opens a file, or one more time one that is open.
    pub async fn open(
        &mut self,
        view: &View,
        at: Location,
        flags: OpenFlags,
    ) -> Result<u64, Problem> {
        if let Some(number) = self.number_at(&at) {
            if flags.contains(OpenFlags::EXCLUDE) {
                return Err(taken("write", &at));
            }
            let file = self.get(number)?;
            if flags.contains(OpenFlags::TRUNCATE) {
                file.set_length(view, 0).await?;
            }
            file.writers += 1;
            return Ok(number);
        }
        let file = File::open(view, at, flags).await?;
        self.next += 1;
        self.files.insert(self.next, file);
        Ok(self.next)
    }

    /// Sets the length of a file that nobody has open.
    pub async fn cut(&mut self, view: &View, at: Location, length: u64) -> Result<(), Problem> {
        let number = self.open(view, at, OpenFlags::WRITE).await?;
        let set = self.get(number)?.set_length(view, length).await;
        self.close(view, number).await.and(set)
    }

    /// # Errors
    /// If the client has no such handle.
    pub fn get(&mut self, number: u64) -> Result<&mut File, Problem> {
        self.files.get_mut(&number).ok_or_else(|| missing("can't use a file"))
    }

    /// The open file there, if this client has one that was not deleted.
    pub fn at(&mut self, at: &Location) -> Option<&mut File> {
        let number = self.number_at(at)?;
        self.files.get_mut(&number)
    }

    /// The handle of the open file there.
    pub fn number_at(&self, at: &Location) -> Option<u64> {
        let mut files = self.files.iter();
        files.find(|(_, file)| !file.is_deleted && file.at == *at).map(|(number, _)| *number)
    }

    /// The files in a directory.
    pub fn in_directory<'a>(&'a self, at: &'a Location) -> impl Iterator<Item = &'a File> {
        let files = self.files.values().filter(|file| !file.is_deleted);
        files.filter(move |file| below(&file.at, at).is_some_and(|names| names.len() == 1))
    }

    /// One who may write it closes it. Where it was, if it has its name now.
    pub async fn close(&mut self, view: &View, number: u64) -> Result<Option<Location>, Problem> {
        let file = self.get(number)?;
        file.writers -= 1;
        if file.writers > 0 {
            return Ok(None);
        }
        let Some(file) = self.files.remove(&number) else { return Ok(None) };
        let at = file.at.clone();
        let is_changed = file.end(view).await?;
        Ok(is_changed.then_some(at))
    }

    /// Closes all without putting what was written in place.
    pub fn clear(&mut self) {
        self.files.clear();
    }

    /// Deletes a file, in the tree and here. One of both is enough.
    pub async fn delete(&mut self, view: &View, at: Location) -> Result<(), Problem> {
        let is_written = match self.at(&at) {
            Some(file) => file.delete().await.map(|()| true)?,
            None => false,
        };
        match view.remove_file(at).await {
            Err(problem) if is_written && problem.kind == ProblemKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Makes a directory.
    pub async fn make_directory(&mut self, view: &View, at: Location) -> Result<(), Problem> {
        match self.number_at(&at) {
            Some(_) => Err(taken("make the directory", &at)),
            None => view.make_directory(at).await,
        }
    }

    /// Deletes an empty directory.
    pub async fn delete_directory(&mut self, view: &View, at: Location) -> Result<(), Problem> {
        if self.in_directory(&at).next().is_some() {
            let what = format!("can't delete the directory repo:/{at}");
            return Err(Problem::conflict(what, "the directory is not empty"));
        }
        view.remove_directory(at).await
    }

    /// Gives a file or a directory another name, in the tree and here.
    pub async fn rename(
        &mut self,
        view: &View,
        (old, new): (Location, Location),
        replace: bool,
    ) -> Result<(), Problem> {
        if old != new && self.number_at(&new).is_some() {
            if !replace {
                let what = format!("can't rename repo:/{old} to repo:/{new}");
                return Err(Problem::conflict(what, "it exists already"));
            }
            if self.number_at(&old).is_none() && view.entry(old.clone()).await?.is_directory() {
                let what = format!("can't rename repo:/{old} to repo:/{new}");
                return Err(Problem::conflict(what, "a file is there"));
            }
        }
        match view.rename(old.clone(), new.clone(), replace).await {
            // It has no name in the tree yet.
            Err(problem)
                if problem.kind == ProblemKind::NotFound && self.number_at(&old).is_some() =>
            {
                free(view, (&old, &new), replace).await?;
            }
            renamed => renamed?,
        }
        if old == new {
            return Ok(());
        }
        if let Some(replaced) = self.at(&new) {
            replaced.delete().await?;
        }
        for file in self.files.values_mut().filter(|file| !file.is_deleted) {
            let Some(names) = below(&file.at, &old) else { continue };
            let Location::In(tenant, path) = &new else { continue };
            let text = [&[path.to_string()][..], names].concat().join("/");
            file.move_to(Location::In(tenant.clone(), DataPath::parse(&text)?)).await?;
        }
        Ok(())
    }
}

/// Whether a file that has no name in the tree yet may have a new one.
async fn free(
    view: &View,
    (old, new): (&Location, &Location),
    replace: bool,
) -> Result<(), Problem> {
    let what = || format!("can't rename repo:/{old} to repo:/{new}");
    let tenant = |at: &Location| match at {
        Location::In(tenant, _) => Some(tenant.clone()),
        Location::Top => None,
    };
    view.may_write(new.clone()).await?;
    if tenant(old) != tenant(new) {
        return Err(Problem::conflict(what(), "they are of two tenants")
            .next("copy the file, and delete the old one"));
    }
    match view.entry(new.clone()).await {
        Ok(there) if !replace || there.is_directory() => {
            Err(Problem::conflict(what(), "it exists already"))
        }
        Err(problem) if problem.kind != ProblemKind::NotFound => Err(problem),
        _ => Ok(()),
    }
}
