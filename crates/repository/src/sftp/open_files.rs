//! How many files and directories all sessions have open together. Each has pieces in memory, and each session may have
//! [`super::packets::HANDLES_MAX`] of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use perigee_model::{Problem, TenantName};

use crate::space::lock;

/// With half a MiB each, the files of all take 512 MiB at most.
const FILES_MAX: usize = 1024;
/// Of one tenant's users, so that others can open some too.
const FILES_OF_ONE_MAX: usize = 256;

/// The files that are open, by the tenants whose users have opened them.
#[derive(Debug, Default)]
pub struct OpenFiles(Mutex<BTreeMap<TenantName, usize>>);

/// One open file.
#[derive(Debug)]
pub struct OpenFile {
    files: Arc<OpenFiles>,
    tenant: TenantName,
}

impl OpenFiles {
    /// # Errors
    /// `Unavailable` if too many are open.
    pub fn take(self: &Arc<Self>, tenant: &TenantName) -> Result<OpenFile, Problem> {
        let mut open = lock(&self.0);
        let refused = |why| {
            Problem::unavailable("can't open a file or directory", why)
                .next("close others, or try again later")
        };
        if open.values().sum::<usize>() >= FILES_MAX {
            return Err(refused(format!("{FILES_MAX} are open by SFTP, which is the limit")));
        }
        let own = open.entry(tenant.clone()).or_default();
        if *own >= FILES_OF_ONE_MAX {
            let why = format!("{FILES_OF_ONE_MAX} of the tenant are, which is the limit of one");
            return Err(refused(why));
        }
        *own += 1;
        Ok(OpenFile { files: Arc::clone(self), tenant: tenant.clone() })
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let mut open = lock(&self.files.0);
        if let Some(own) = open.get_mut(&self.tenant) {
            *own -= 1;
            if *own == 0 {
                open.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_leaves_open_files_to_others_and_what_is_closed_is_free() {
        let files = Arc::new(OpenFiles::default());
        let tenant = |number: usize| TenantName::new(format!("t{number}")).expect("a name");
        let mut open = Vec::new();
        for number in 0..FILES_MAX / FILES_OF_ONE_MAX {
            for _ in 0..FILES_OF_ONE_MAX {
                open.push(files.take(&tenant(number)).expect("a file"));
            }
            let refused = files.take(&tenant(number)).expect_err("one tenant has its limit");
            assert!(refused.why.contains("256 of the tenant") || number == 3, "{refused}");
        }
        let refused = files.take(&tenant(9)).expect_err("all have theirs");
        assert!(refused.why.contains("1024"), "{refused}");
        drop(open.pop());
        drop(files.take(&tenant(9)).expect("one was closed"));
        drop(open);
        assert!(lock(&files.0).is_empty());
    }
}
