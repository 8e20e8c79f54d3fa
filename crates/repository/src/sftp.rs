//! The SFTP door. russh speaks SSH, and russh-sftp the protocol in it; a session's files are in [`session`].
//!
//! A user logs in with a token as the password, under any name, or with an SSH key under its own name. Each request asks
//! anew what the user may do. There are no shells, no forwarding and no links: only the subsystem `sftp`, which scp of
//! OpenSSH 9 uses too.

mod open_files;
pub(crate) mod packets;
mod pump;
pub(crate) mod serve;
mod session;
mod written;

use std::net::{IpAddr, Shutdown};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use perigee_http::{ClientAddress, Listen, Places, cannot_listen, write_private};
use perigee_model::Problem;
use russh::keys::ssh_key::LineEnding;
use russh::keys::ssh_key::private::Ed25519Keypair;
use russh::keys::{HashAlg, PrivateKey};
use russh::server::{Auth, ChannelOpenHandle, Config, Handler, Msg, Session, VerifiedPublicKey};
use russh::{Channel, ChannelId, MethodKind, MethodSet, SshId};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use crate::account::{Accounts, Credential};
use crate::repository::Repository;
use open_files::OpenFiles;
use session::User;

/// The most connections, and the most of them from one address.
const CONNECTIONS_MAX: usize = 512;
const CONNECTIONS_OF_ONE_MAX: usize = 128;
/// How long a client may take to log in.
pub const LOGIN_MAX: Duration = Duration::from_secs(30);
/// How long a client that has taken too long may take to hear so.
const FAREWELL_MAX: Duration = Duration::from_secs(5);
/// A session in which nothing happens for this long is ended.
const SILENCE_MAX: Duration = Duration::from_secs(600);
/// How often it is looked whether a connection's user is still one. So long a removed user may keep open what it has.
pub const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Channels of one connection.
const CHANNELS_MAX: usize = 4;

/// An SFTP server.
pub struct Server {
    /// `HOST:PORT`
    pub address: String,
    /// The host key; it is made if there is none.
    pub key_file: PathBuf,
    /// The files.
    pub repository: Arc<Repository>,
    /// The users.
    pub accounts: Arc<dyn Accounts>,
    /// How long a client may take to log in: [`LOGIN_MAX`].
    pub login_max: Duration,
    /// How often it is looked whether a connection's user is still one: [`LOOK_EVERY`].
    pub look_every: Duration,
}

/// Serves until the future is dropped.
///
/// # Errors
/// If the address is taken, or the host key can't be used.
pub async fn serve(server: Server) -> Result<(), Problem> {
    let key = host_key(&server.key_file)?;
    tracing::info!(fingerprint = %key.fingerprint(HashAlg::Sha256), "the host key of SFTP");
    let config = Arc::new(Config {
        server_id: SshId::Standard("SSH-2.0-perigee".into()),
        methods: MethodSet::from(&[MethodKind::PublicKey, MethodKind::Password][..]),
        auth_rejection_time: Duration::from_secs(1),
        auth_rejection_time_initial: Some(Duration::ZERO),
        max_auth_attempts: 6,
        keys: vec![key],
        inactivity_timeout: Some(SILENCE_MAX),
        ..Config::default()
    });
    let listener = TcpListener::bind(&server.address).await.map_err(|e| {
        cannot_listen("listen for SFTP on", &Listen::Tcp(server.address.clone()), &e)
    })?;
    let places = Places::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
    let files = Arc::new(OpenFiles::default());
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Such as too many open files: others may be closed meanwhile.
                tracing::warn!(%error, "can't accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match places.take(ClientAddress::from(address)) {
            Ok(place) => {
                // An answer of two packets would wait for the client's acknowledgement of the first, which takes 40 ms.
                // russh does this only for sockets that it accepts itself. A connection that refuses is gone already.
                let _ = stream.set_nodelay(true);
                let connection = Connection {
                    repository: Arc::clone(&server.repository),
                    accounts: Arc::clone(&server.accounts),
                    files: Arc::clone(&files),
                    address: address.ip().to_canonical(),
                    credential: Arc::default(),
                    channels: Vec::new(),
                    places: Arc::new(Semaphore::new(CHANNELS_MAX)),
                };
                let (config, look_every) = (Arc::clone(&config), server.look_every);
                let until = Instant::now() + server.login_max;
                tokio::spawn(async move {
                    converse(config, stream, connection, (until, look_every)).await;
                    drop(place);
                });
            }
            Err(why) => tracing::info!(%address, why, "an SFTP client is refused"),
        }
    }
}

/// Ends a connection whose client has not logged in by `until`, or whose user was removed: what that one has open takes
/// others' room.
async fn converse(
    config: Arc<Config>,
    stream: TcpStream,
    connection: Connection,
    (until, look_every): (Instant, Duration),
) {
    let (credential, accounts) =
        (Arc::clone(&connection.credential), Arc::clone(&connection.accounts));
    let Ok(socket) = stream.as_fd().try_clone_to_owned().map(std::net::TcpStream::from) else {
        return;
    };
    let begun = timeout_at(until, russh::server::run_stream(config, stream, connection));
    let Ok(Ok(running)) = begun.await else { return };
    let handle = running.handle();
    tokio::pin!(running);
    if timeout_at(until, &mut running).await.is_ok() {
        return;
    }
    if let Some(credential) = credential.get() {
        let is_over = async {
            while accounts.account(credential).is_some() {
                tokio::time::sleep(look_every).await;
            }
        };
        tokio::select! {
            _ = &mut running => return,
            () = is_over => {}
        }
        let _ = socket.shutdown(Shutdown::Both);
    } else {
        let why = "it took too long to log in".to_owned();
        // A session that has ended meanwhile needs no farewell.
        let _ = handle.disconnect(russh::Disconnect::ByApplication, why, String::new()).await;
        // russh says it only between two handshakes, and then waits for the client to hang up.
        if timeout(FAREWELL_MAX, &mut running).await.is_ok() {
            return;
        }
        let _ = socket.shutdown(Shutdown::Both);
    }
    drop(socket);
    // However it ends, its place is free again.
    let _ = running.await;
}

/// The server's key is made once, so that clients know it again.
fn host_key(file: &Path) -> Result<PrivateKey, Problem> {
    let what = || format!("can't use the host key {}", file.display());
    if file.exists() {
        let text = std::fs::read(file).map_err(|e| Problem::invalid(what(), e))?;
        return PrivateKey::from_openssh(text).map_err(|e| {
            Problem::invalid(what(), e)
                .next("remove it, and a new one is made; clients will notice")
        });
    }
    let mut seed = [0_u8; 32];
    let mut filled = 0;
    while filled < seed.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut seed[filled..], flags)
            .map_err(|e| Problem::internal(what(), std::io::Error::from(e)))?;
    }
    let key = PrivateKey::from(Ed25519Keypair::from_seed(&seed));
    let text = key.to_openssh(LineEnding::LF).map_err(|e| Problem::internal(what(), e))?;
    write_private(file, text.as_bytes())?;
    Ok(key)
}

struct Connection {
    repository: Arc<Repository>,
    accounts: Arc<dyn Accounts>,
    files: Arc<OpenFiles>,
    address: IpAddr,
    /// By what the client has logged in, if it has.
    credential: Arc<OnceLock<Credential>>,
    /// Channels on which no subsystem was asked for yet.
    channels: Vec<Channel<Msg>>,
    /// What is left of [`CHANNELS_MAX`] for channels on which files are served.
    places: Arc<Semaphore>,
}

impl Connection {
    fn admit(&mut self, credential: Option<Credential>) -> Auth {
        let known = credential.and_then(|own| Some((self.accounts.account(&own)?, own)));
        let Some((account, credential)) = known else { return Auth::reject() };
        tracing::info!(tenant = %account.tenant, user = account.user, "a user comes by SFTP");
        // A client logs in once.
        if self.credential.set(credential).is_err() {
            return Auth::reject();
        }
        Auth::Accept
    }
}

impl Handler for Connection {
    type Error = russh::Error;

    async fn auth_password(&mut self, _user: &str, password: &str) -> Result<Auth, Self::Error> {
        let credential = self.accounts.by_token(password);
        let answer = self.admit(credential);
        if matches!(answer, Auth::Reject { .. }) {
            self.accounts.refused(self.address, "the password of an SFTP client is no token");
        }
        Ok(answer)
    }

    async fn auth_publickey(
        &mut self,
        user: &str,
        key: VerifiedPublicKey<'_>,
    ) -> Result<Auth, Self::Error> {
        let Ok(text) = key.public_key.to_openssh() else { return Ok(Auth::reject()) };
        // Kind and key, without the comment.
        let words: Vec<&str> = text.split_ascii_whitespace().take(2).collect();
        let (key, login) = (words.join(" "), user.to_owned());
        let answer = self.admit(Some(Credential::Key { key, login }));
        if matches!(answer, Auth::Reject { .. }) {
            self.accounts.refused(self.address, "the key of an SFTP client is nobody's");
        }
        Ok(answer)
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), Self::Error> {
        // Otherwise the reply is dropped, which refuses the channel.
        if self.channels.len() < CHANNELS_MAX {
            self.channels.push(channel);
            reply.accept().await;
        }
        Ok(())
    }

    async fn subsystem_request(
        &mut self,
        id: ChannelId,
        name: &str,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        let place = self.channels.iter().position(|channel| channel.id() == id);
        let (Some(credential), Some(place), "sftp") = (self.credential.get(), place, name) else {
            return session.channel_failure(id);
        };
        let user = User {
            repository: Arc::clone(&self.repository),
            accounts: Arc::clone(&self.accounts),
            credential: credential.clone(),
        };
        let channel = self.channels.swap_remove(place);
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            return session.channel_failure(id);
        };
        let files = Arc::clone(&self.files);
        session.channel_success(id)?;
        session::run(channel.into_stream(), user, files, place);
        Ok(())
    }

    async fn exec_request(
        &mut self,
        id: ChannelId,
        _command: &[u8],
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_failure(id)
    }

    async fn shell_request(
        &mut self,
        id: ChannelId,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_failure(id)
    }

    async fn channel_eof(
        &mut self,
        id: ChannelId,
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        // Without a status scp says that it has failed.
        session.exit_status_request(id, 0)?;
        session.close(id)
    }
}
