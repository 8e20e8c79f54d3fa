//! Tests of the store below the doors.

mod crash;
mod forget;
mod model;
mod names;
mod quota;
mod reading;
mod sharing;

use std::path::Path;
use std::sync::Arc;

use perigee_model::{Problem, TenantName};

use crate::account::{Account, Quota};
use crate::path::DataPath;
use crate::repository::Repository;
use crate::space::Space;
use crate::upload::{Begin, Upload};
use crate::view::View;

pub fn path(text: &str) -> DataPath {
    DataPath::parse(text).expect("a path")
}

pub fn space(directory: &Path) -> Arc<Space> {
    let clock = Arc::new(perigee_http::Clock::new("boot 1".to_owned()));
    let space = Space::open(TenantName::default(), directory, "boot 1", clock).expect("a space");
    Arc::new(space)
}

pub fn put(space: &Arc<Space>, to: &str, content: &[u8]) -> Result<(), Problem> {
    let mut upload = Upload::begin(space, &path(to), Begin::Empty)?;
    upload.write(0, content)?;
    upload.commit(None).map(drop)
}

pub fn get(space: &Space, from: &str) -> Result<Vec<u8>, Problem> {
    let mut reader = space.read(&path(from))?;
    let mut content = Vec::new();
    loop {
        let piece = reader.read(content.len() as u64, 7)?;
        if piece.is_empty() {
            return Ok(content);
        }
        content.extend_from_slice(&piece);
    }
}

pub fn account(tenant: &str) -> Account {
    Account {
        tenant: tenant.parse().expect("a name"),
        user: "tester".to_owned(),
        may_write: true,
        is_admin: false,
        quota: Quota::default(),
    }
}

pub fn view(repository: &Arc<Repository>, tenant: &str) -> View {
    View::new(Arc::clone(repository), account(tenant))
}
