//! `perigee vm cp`: copies a file into a guest or out of it, through its guest agent.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use futures_util::{StreamExt as _, stream};
use perigee_http::{Body, Client, Method};
use perigee_model::limits::GUEST_FILE_BYTES;
use perigee_model::percent::encoded_path;
use perigee_model::persistent_vm::CopiedFile;
use perigee_model::spec::check_guest_path;
use perigee_model::{Problem, ProblemKind, VmId};
use tokio::io::AsyncReadExt as _;

use crate::commands::data::get::check_replaceable;
use crate::output;

/// Of a file here, in one piece.
const PIECE_BYTES: usize = 128 << 10;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Here(PathBuf),
    InGuest(VmId, String),
}

impl Place {
    /// `VM:PATH` with an absolute path is in a guest. A file here whose name looks like this is written `./NAME`.
    fn of(text: &str) -> Self {
        let in_guest = text.split_once(':').filter(|(_, path)| path.starts_with('/'));
        let in_guest = in_guest.and_then(|(vm, path)| Some((vm.parse().ok()?, path.to_owned())));
        in_guest.map_or_else(|| Self::Here(text.into()), |(vm, path)| Self::InGuest(vm, path))
    }
}

fn file_name(path: &str) -> Result<&str, Problem> {
    let name = path.rsplit('/').next().filter(|name| !name.is_empty());
    name.ok_or_else(|| Problem::invalid(format!("can't copy {path}"), "it names no file"))
}

/// Copies one file between this machine and a guest. One of the two names has the form `VM:/PATH`.
///
/// # Errors
/// `Invalid` if both or none have it.
pub async fn copy(client: &Client, from: &str, to: &str) -> Result<(), Problem> {
    match (Place::of(from), Place::of(to)) {
        (Place::Here(file), Place::InGuest(vm, path)) => {
            let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
            let path = match (path.ends_with('/'), name) {
                (true, Some(name)) => format!("{path}{name}"),
                _ => path,
            };
            send(client, &file, &vm, &path).await
        }
        (Place::InGuest(vm, path), Place::Here(file)) => {
            let file = if file.is_dir() { file.join(file_name(&path)?) } else { file };
            fetch(client, &vm, &path, &file).await
        }
        _ => {
            let why = "one of the two has to be in a guest, as VM:/PATH, and the other one here";
            Err(Problem::invalid(format!("can't copy {from} to {to}"), why))
        }
    }
}

/// The path of the API for a file in a guest.
fn address(vm: &VmId, path: &str) -> Result<String, Problem> {
    check_guest_path(path).map_err(|why| Problem::invalid(format!("can't copy {path}"), why))?;
    Ok(format!("/v1/vms/{vm}/file?path={}", encoded_path(path)))
}

async fn send(client: &Client, file: &Path, vm: &VmId, path: &str) -> Result<(), Problem> {
    let what = || format!("can't read {}", file.display());
    let problem = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Problem::not_found(what(), error),
        _ => Problem::invalid(what(), error),
    };
    let opened = tokio::fs::File::open(file).await.map_err(problem)?;
    let meta = opened.metadata().await.map_err(problem)?;
    if !meta.is_file() {
        return Err(Problem::invalid(what(), "it is no file"));
    }
    GUEST_FILE_BYTES.check(meta.len()).map_err(|error| error.problem(what()))?;
    let bar = output::progress_bar(vm, "{bytes} of {total_bytes}");
    bar.set_length(meta.len());
    let shown = bar.clone();
    let pieces = stream::try_unfold(opened, async |mut opened| {
        let mut piece = vec![0; PIECE_BYTES];
        let length = opened.read(&mut piece).await?;
        piece.truncate(length);
        Ok::<_, std::io::Error>((length > 0).then_some((piece, opened)))
    });
    let pieces = pieces.inspect(move |piece| {
        shown.inc(piece.as_ref().map_or(0, |piece| piece.len() as u64));
    });
    let body = Body::from_stream(pieces);
    let sent = client.send_body::<CopiedFile>(Method::PUT, &address(vm, path)?, body).await;
    bar.finish_and_clear();
    let copied = sent?.bytes;
    if copied != meta.len() {
        let why =
            format!("{copied} bytes of {} have arrived; it has changed meanwhile", meta.len());
        return Err(Problem::conflict(format!("can't copy {}", file.display()), why));
    }
    Ok(())
}

/// The file appears under its name when all of it is here.
async fn fetch(client: &Client, vm: &VmId, path: &str, file: &Path) -> Result<(), Problem> {
    let what = || format!("can't write {}", file.display());
    let problem = |error: std::io::Error| Problem::of_io(ProblemKind::Invalid, what(), &error);
    check_replaceable(file)?;
    let mut answer = client.get_response(&address(vm, path)?).await?;
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut part =
        tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new("."))).map_err(problem)?;
    let bar = output::progress_bar(vm, "{bytes}");
    let taken = async {
        while let Some(piece) = answer
            .chunk()
            .await
            .map_err(|error| Problem::unavailable(format!("can't copy {vm}:{path}"), error))?
        {
            part.write_all(&piece).map_err(problem)?;
            bar.inc(piece.len() as u64);
        }
        Ok::<(), Problem>(())
    };
    let taken = taken.await;
    bar.finish_and_clear();
    taken?;
    part.persist(file).map_err(|error| problem(error.error)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_a_guest_has_an_absolute_path() {
        let web: VmId = "web".parse().expect("a name");
        assert_eq!(Place::of("web:/etc/hosts"), Place::InGuest(web, "/etc/hosts".to_owned()));
        for here in ["web", "./web:/etc", "a:b", "/tmp/web:/x"] {
            assert_eq!(Place::of(here), Place::Here(here.into()), "{here}");
        }
    }

    #[test]
    fn a_path_in_a_guest_survives_the_way_there() {
        let web: VmId = "web".parse().expect("a name");
        let address = address(&web, "/a b/ü&c=%").expect("a path");
        assert_eq!(address, "/v1/vms/web/file?path=/a%20b/%C3%BC%26c%3D%25");
    }
}
