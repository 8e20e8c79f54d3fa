//! The HTTP server for machines' firmware, and dnsmasq.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path as Segment, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use perigee_http::{Client, ClientAddress, Failure, Listen, Network};
use perigee_model::client::{Boot, BootRequest, MacAddress, Over};
use perigee_model::{Problem, ProblemKind};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::io::ReaderStream;

use crate::cards::{self, Cards};
use crate::config::{Config, Dhcp};
use crate::dnsmasq::{self, Dnsmasq};
use crate::script::Places;

/// How long the volume server may take. A clone takes milliseconds, but many machines may ask at once.
const ASK_MAX: Duration = Duration::from_secs(60);
/// How long it may take to say which clients there are.
const LIST_MAX: Duration = Duration::from_secs(5);

struct Shared {
    volumes: Client,
    places: Places,
    kernel: Option<PathBuf>,
    initrd: Option<PathBuf>,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// Not found when the network interface does not exist; a conflict when a port is taken; unavailable when
/// dnsmasq ends.
pub async fn serve(config: Config) -> Result<(), Problem> {
    perigee_http::prepare_daemon();
    let on =
        |kind| signal(kind).map_err(|error| Problem::internal("can't listen for signals", error));
    let (mut terminate, mut interrupt) =
        (on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
    let interface = config.interface()?;
    for file in [&config.kernel, &config.initrd].into_iter().flatten() {
        std::fs::File::open(file)
            .map_err(|error| Problem::invalid(format!("can't serve {}", file.display()), error))?;
    }
    let places = Places {
        address: interface.address,
        http_port: config.http_port,
        iscsi_port: config.iscsi_port,
        nbd_port: config.nbd_port,
        append: config.append.clone(),
    };
    let volumes = Client::new(&config.control, ASK_MAX)?
        .hint("is the volume server running? perigee volume serve starts it");
    let lister = Client::new(&config.control, LIST_MAX)?;
    let mut cards = cards::known(&lister).await;
    let configure = |cards: Option<&Cards>| {
        let none = Cards::new();
        // Without an answer nobody knows which leases are nobody's any more.
        if let Some(Err(problem)) = cards.map(|cards| dnsmasq::end_leases(&config.state, cards)) {
            // They end by themselves. Until then they take addresses, and machines boot.
            tracing::warn!(%problem, "addresses of machines that are no clients stay taken");
        }
        dnsmasq::configuration(&config, &interface, &places, cards.unwrap_or(&none))
    };
    let http = Listen::Tcp(format!("{}:{}", interface.address, config.http_port));
    let (kernel, initrd) = (config.kernel.clone(), config.initrd.clone());
    let router = router(Arc::new(Shared { volumes, places: places.clone(), kernel, initrd }));
    // One that an earlier boot server has left would write the leases that it knows.
    dnsmasq::end_left_over(&config).await;
    let mut dnsmasq = Dnsmasq::start(&config, &configure(cards.as_ref())).await?;
    let addresses = [http];
    let mut served = std::pin::pin!(perigee_http::serve(router, &addresses, &Network::Plain));
    // Firmware speaks no TLS that it could check.
    tracing::warn!(
        "nothing here is encrypted: whoever is in this network can read scripts with CHAP secrets, and the machines' disks"
    );
    tracing::info!(interface = %interface.name, http = %addresses[0], "ready");
    let ended = loop {
        cards = tokio::select! {
            failed = &mut served => break failed,
            problem = dnsmasq.ended() => return Err(problem),
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            new = cards::changed(&lister, cards.as_ref()), if config.dhcp != Dhcp::Proxy => Some(new),
        };
        // It can't read its configuration again: it has given up the right to.
        dnsmasq.stop().await;
        dnsmasq = Dnsmasq::start(&config, &configure(cards.as_ref())).await?;
    };
    dnsmasq.stop().await;
    ended
}

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/boot.ipxe", get(first))
        .route("/boot/{mac}", get(boot))
        .route("/kernel", get(kernel))
        .route("/initrd", get(initrd))
        .with_state(shared)
}

/// A script must not be cached: it is for one machine and one boot, and may have a secret.
fn script(text: String) -> Response {
    ([("content-type", "text/plain"), ("cache-control", "no-store")], text).into_response()
}

async fn first(State(shared): State<Arc<Shared>>) -> Response {
    script(shared.places.first())
}

/// Every answer is a script, because firmware shows only the number of an HTTP error.
async fn boot(
    State(shared): State<Arc<Shared>>,
    Extension(ClientAddress(address)): Extension<ClientAddress>,
    Segment(mac): Segment<String>,
) -> Response {
    let what = "can't boot this machine";
    let mac: MacAddress = match mac.parse() {
        Ok(mac) => mac,
        Err(error) => return script(Places::refuse(&Problem::invalid(what, error))),
    };
    let told = match shared.volumes.post("/v1/boot", &BootRequest { mac, address }).await {
        Ok(boot) => shared.can_start(boot),
        Err(problem) => Err(problem),
    };
    script(match told {
        Ok(boot) => {
            let Boot { client, volume, over, .. } = &boot;
            tracing::info!(%mac, %client, %volume, %over, "boots");
            shared.places.boot(&boot)
        }
        Err(problem) => {
            tracing::warn!(%mac, %problem, "a machine can't boot");
            match problem.kind {
                ProblemKind::Unavailable
                | ProblemKind::NoSpace
                | ProblemKind::Unsupported
                | ProblemKind::Internal => shared.places.wait(&problem),
                _ => Places::refuse(&problem),
            }
        }
    })
}

impl Shared {
    /// Refuses a boot over NBD if no kernel is configured.
    fn can_start(&self, boot: Boot) -> Result<Boot, Problem> {
        if boot.over == Over::Nbd && (self.kernel.is_none() || self.initrd.is_none()) {
            return Err(Problem::invalid(
                format!("can't boot client {} over NBD", boot.client),
                "the boot server has no kernel and initramfs for it",
            )
            .next("perigee boot serve needs --kernel and --initrd"));
        }
        Ok(boot)
    }
}

async fn kernel(State(shared): State<Arc<Shared>>) -> Result<Response, Failure> {
    file("can't serve the kernel", shared.kernel.as_deref()).await
}

async fn initrd(State(shared): State<Arc<Shared>>) -> Result<Response, Failure> {
    file("can't serve the initramfs", shared.initrd.as_deref()).await
}

async fn file(what: &str, path: Option<&Path>) -> Result<Response, Failure> {
    let path = path.ok_or_else(|| {
        Problem::not_found(what, "the boot server was started without it")
            .next("perigee boot serve needs --kernel and --initrd for NBD")
    })?;
    let failed = |error| Problem::internal(format!("can't read {}", path.display()), error);
    let file = tokio::fs::File::open(path).await.map_err(failed)?;
    let length_bytes = file.metadata().await.map_err(failed)?.len();
    Response::builder()
        .header("content-type", "application/octet-stream")
        .header("content-length", length_bytes)
        .body(Body::from_stream(ReaderStream::with_capacity(file, 256 << 10)))
        .map_err(|error| Failure(Problem::internal(what, error)))
}
