//! `report.html`: a pure function of [`Results`].

use std::fmt::Write;

use perigee_lab::report::page::{self, TABLE_END, ratio, row};

use crate::results::{LoadName, Results, Row};
use crate::servers::MEMORY_BYTES;

// Writing to a String cannot fail, so the results of `write!` below are ignored.

pub fn html(results: &Results) -> String {
    let mut page = page::start("Perigee: the doors of the data repository", "");
    let _ = writeln!(
        page,
        "<h1>The doors of the data repository</h1>\n<p class=\"lead\">HTTP, WebDAV, SFTP and FTPS of one controller beside nginx with \
         WebDAV, vsftpd, and OpenSSH's sftp-server: on one machine with {} CPUs, over the loopback interface, with the same \
         clients (curl, OpenSSH's sftp, lftp for small files over FTP; the CLI is the perigee command, whose downloads go to the disk), alternating; medians. HTTP, WebDAV and plain FTP are not encrypted here; FTPS, SFTP and the doors with TLS are, and these have a \
         controller of their own. Perigee \
         hashes each file, and answers when content, hash and name are on the disk. The others answer when the content is in the \
         page cache, and a power cut may take it. So there is also the time with a <code>sync</code> after the transfer.</p>",
        results.cpus
    );
    if let Some(summing) = &results.summing {
        let _ = writeln!(
            page,
            "<p>On one CPU of this machine a SHA-256 takes {:.2} s for a GiB, and a CRC-64 {:.3} s. An upload computes both, a download only the CRC.</p>",
            summing.sha256_s_per_gib, summing.crc64_s_per_gib
        );
    }
    page::goals(&mut page, &results.goals);
    table(&mut page, results, false);
    table(&mut page, results, true);
    heavy(&mut page, results);
    killed(&mut page, results);
    page::end(&mut page, &results.versions);
    page
}

fn table(page: &mut String, results: &Results, is_small: bool) {
    let (title, unit, text) = match is_small {
        false => (
            "Bytes",
            "MiB/s",
            "One client with one large file, and 64 clients at once with one file each.",
        ),
        true => {
            ("Small files", "files/s", "8 clients send files of 4 KiB, each over one connection.")
        }
    };
    let with_sync = format!("{unit} with sync");
    page::table(
        page,
        title,
        text,
        &["work", "door", unit, &with_sync, "beside the best of the others that encrypts alike"],
    );
    let figure = |row: &Row| if is_small { row.files_per_s } else { row.mib_per_s };
    let durable =
        |row: &Row| if is_small { row.durable_files_per_s } else { row.durable_mib_per_s };
    let rows = results.medians();
    for one in rows.iter().filter(|row| (row.what.load == LoadName::Small) == is_small) {
        let peers = rows.iter().filter(|row| row.what == one.what && !row.door.is_perigee());
        let peers = peers.filter(|row| row.door.has_tls() == one.door.has_tls());
        let best = peers.map(figure).fold(0.0, f64::max);
        let own = one.door.is_perigee().then(|| figure(one));
        let cells = [
            one.what.name(),
            one.door.name().to_owned(),
            format!("{:.1}", figure(one)),
            format!("{:.1}", durable(one)),
            ratio(own, Some(best)),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn heavy(page: &mut String, results: &Results) {
    let text = format!(
        "The controller and the FTPS gateway may each have {} MiB of data in memory (<code>prlimit --data</code>). Before each transfer the kernel's record of \
         the most resident memory (<code>VmHWM</code>) is reset.",
        MEMORY_BYTES >> 20
    );
    let columns =
        ["client", "work", "s", "server's memory before, MiB", "the most meanwhile, MiB", "failed"];
    page::table(
        page,
        "A file larger than the server's memory, and many small ones",
        &text,
        &columns,
    );
    for one in &results.heavy {
        let mib = |bytes: u64| (bytes >> 20).to_string();
        let seconds = format!("{:.1}", one.seconds);
        let cells = [
            one.client.clone(),
            one.work.clone(),
            seconds,
            mib(one.before_bytes),
            mib(one.peak_bytes),
            one.error.clone().unwrap_or_default(),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}

fn killed(page: &mut String, results: &Results) {
    page::table(
        page,
        "A server is killed",
        "SIGKILL while clients upload. Afterwards each file whose upload was acknowledged must be there with its content.",
        &["door", "killed", "clients", "acknowledged", "lost"],
    );
    for one in &results.killed {
        let cells = [
            one.door.name().to_owned(),
            one.victim.name().to_owned(),
            one.clients.to_string(),
            one.acknowledged.to_string(),
            one.lost.to_string(),
        ];
        row(page, "", &cells);
    }
    page.push_str(TABLE_END);
}
