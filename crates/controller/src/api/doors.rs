//! The data repository's doors of this cluster, and what its users may do there.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use perigee_http::Failure;
use perigee_model::Problem;
use perigee_model::tenant::AuditEntry;
use perigee_repository::{Account, Accounts, Credential, sftp};

use crate::accounts::files;
use crate::api::{Caller, note_unknown};
use crate::clock::now_ms;
use crate::cluster::Cluster;

/// Where files are served by other protocols than HTTP.
#[derive(Debug, Clone, Default)]
pub struct Doors {
    /// `HOST:PORT` for SFTP.
    pub sftp: Option<String>,
}

/// The HTTP doors of the repository.
pub fn router(cluster: &Arc<Cluster>) -> Router {
    let doors = perigee_repository::router(Arc::clone(&cluster.repository));
    doors.layer(from_fn_with_state(Arc::clone(cluster), with_account))
}

async fn with_account(
    State(cluster): State<Arc<Cluster>>,
    mut request: Request,
    next: Next,
) -> Response {
    match request.extensions().get::<Caller>().map(|caller| account_of(&cluster, caller)) {
        Some(account) => {
            request.extensions_mut().insert(account);
            next.run(request).await
        }
        None => {
            let why = "only users and operators have files";
            Failure(Problem::forbidden("can't use the repository", why)).into_response()
        }
    }
}

/// The other doors, where the user wants them. Without any, this waits for ever.
///
/// # Errors
/// If an address is taken.
pub async fn doors(cluster: &Arc<Cluster>, doors: &Doors) -> Result<(), Problem> {
    let Some(address) = doors.sftp.clone() else { return std::future::pending().await };
    sftp::serve(sftp::Server {
        address,
        key_file: cluster.state_dir.join("sftp-host-key"),
        repository: Arc::clone(&cluster.repository),
        accounts: Arc::new(Users(Arc::clone(cluster))),
        login_max: sftp::LOGIN_MAX,
        look_every: sftp::LOOK_EVERY,
    })
    .await
}

/// The cluster's users, for doors that do not speak HTTP.
struct Users(Arc<Cluster>);

impl Accounts for Users {
    fn by_token(&self, secret: &str) -> Option<Credential> {
        self.0.accounts.token_id(secret).map(Credential::Token)
    }

    fn account(&self, credential: &Credential) -> Option<Account> {
        let accounts = &self.0.accounts;
        let user = match credential {
            Credential::Token(id) => accounts.by_token_id(id),
            Credential::Key { key, login } => accounts.by_key(key, login),
        };
        user.map(|user| account_of(&self.0, &user.into()))
    }

    fn did(&self, account: &Account, what: &str, done: Result<(), &Problem>) {
        let entry = AuditEntry {
            at_ms: now_ms(),
            who: account.user.clone(),
            request: format!("SFTP: {what}"),
            thing: String::new(),
            status: done.map_or_else(Problem::http_status, |()| 200),
        };
        let (cluster, tenant) = (Arc::clone(&self.0), account.tenant.clone());
        // The disk may be slow, and the answer does not wait for it.
        tokio::task::spawn_blocking(move || cluster.audit.add(&tenant, entry));
    }

    fn refused(&self, from: IpAddr, why: &str) {
        note_unknown(&self.0, &from.to_string(), "SFTP: log in", why);
    }
}

fn account_of(cluster: &Cluster, caller: &Caller) -> Account {
    Account {
        tenant: caller.tenant.clone(),
        user: caller.who.clone(),
        may_write: true,
        is_admin: caller.is_admin(),
        quota: files::quota_of(cluster, &caller.tenant),
    }
}
