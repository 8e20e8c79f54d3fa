//! `perigee vm vnc`: a port of this machine that leads a VNC viewer to a VM's screen.
//!
//! QEMU asks for no password: whoever reaches the screen sees it and types there. So the port takes only connections of programs of the
//! user who runs this command, as the kernel says.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use nix::unistd::Uid;
use perigee_http::Client;
use perigee_http::websocket::WebSocket;
use perigee_model::{Problem, VmId};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::output;

/// A client that failed to be accepted is not waited for at full speed.
const AFTER_FAILURE: std::time::Duration = std::time::Duration::from_millis(100);

/// Serves the port until the command is interrupted.
pub async fn serve(client: &Client, vm: &VmId, port: u16) -> Result<(), Problem> {
    let what = || format!("can't show the screen of {vm}");
    // A VM without a screen is told before anybody opens a viewer.
    drop(reach(client, vm).await?);
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Problem::unavailable(what(), format!("{address}: {error}")).next("choose another --port")
    })?;
    let address = listener.local_addr().map_err(|error| Problem::internal(what(), error))?;
    output::text(&format!("vnc://{address}"));
    output::note("open it with a VNC viewer of your own user on this machine; Ctrl-C ends this");
    tokio::select! {
        () = accept(client, vm, &listener) => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn reach(client: &Client, vm: &VmId) -> Result<WebSocket, Problem> {
    client.websocket(&format!("/v1/vms/{vm}/vnc")).await
}

async fn accept(client: &Client, vm: &VmId, listener: &TcpListener) {
    let mut viewers = tokio::task::JoinSet::new();
    loop {
        while viewers.try_join_next().is_some() {}
        let Ok((viewer, from)) = listener.accept().await else {
            tokio::time::sleep(AFTER_FAILURE).await;
            continue;
        };
        if let Err(why) = check_own(&viewer, from) {
            output::note(&format!("a connection from {from} is refused: {why}"));
            continue;
        }
        let (client, vm) = (client.clone(), vm.clone());
        viewers.spawn(async move { show(&client, &vm, viewer).await });
    }
}

async fn show(client: &Client, vm: &VmId, mut viewer: TcpStream) {
    match reach(client, vm).await {
        // What ends it is the viewer's or the VM's business.
        Ok(mut screen) => drop(copy_bidirectional(&mut viewer, &mut screen).await),
        Err(problem) => output::note(&problem.to_string()),
    }
}

/// Whether the program at the other end is one of this user, or of root.
fn check_own(viewer: &TcpStream, from: SocketAddr) -> Result<(), String> {
    let to = viewer.local_addr().map_err(|error| error.to_string())?;
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else {
        return Err("it does not come from this machine".to_owned());
    };
    let sockets = std::fs::read_to_string("/proc/net/tcp")
        .map_err(|error| format!("can't find out whose it is: {error}"))?;
    match owner(&sockets, from, to) {
        Some(uid) if uid == Uid::effective() || uid.is_root() => Ok(()),
        Some(uid) => Err(format!("it is user {uid}'s")),
        None => Err("the kernel does not say whose it is".to_owned()),
    }
}

/// Whose socket has these two ends, in what proc(5) says of `/proc/net/tcp`.
fn owner(sockets: &str, local: SocketAddrV4, remote: SocketAddrV4) -> Option<Uid> {
    let end = |at: SocketAddrV4| {
        format!("{:08X}:{:04X}", u32::from_ne_bytes(at.ip().octets()), at.port())
    };
    let ends = [end(local), end(remote)];
    sockets.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1..3)? == ends;
        is_it.then(|| words.get(7)?.parse().ok().map(Uid::from_raw))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_kernel_says_whose_a_connection_is() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let own = TcpStream::connect(address).await.expect("a connection");
        let (viewer, from) = listener.accept().await.expect("it comes");
        check_own(&viewer, from).expect("it is this test's");
        drop(own);

        let others = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n\
            0: 0100007F:1770 0100007F:1770 01 00000000:00000000 00:00000000 00000000  1234 0 1";
        let at = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 6000);
        assert_eq!(owner(others, at, at), Some(Uid::from_raw(1234)));
        assert_eq!(owner(others, at, SocketAddrV4::new(Ipv4Addr::LOCALHOST, 6001)), None);
    }
}
