//! `perigee image build`: makes a golden image by a recipe that comes with Perigee, as `scripts/golden-image` does in its sources.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::ValueEnum;
use perigee_model::{ImageName, Problem};
use tokio::process::Command;

use crate::servers::PoolOption;

/// What `perigee image build` takes.
#[derive(Debug, clap::Args)]
pub struct Build {
    /// What is built
    recipe: Recipe,
    /// Further packages of Debian that are put into it
    #[arg(long, value_name = "PACKAGE,…", value_delimiter = ',')]
    also: Vec<String>,
    /// The new image's name
    #[arg(long, default_value = "debian", value_name = "NAME")]
    pub name: ImageName,
    #[command(flatten)]
    pub pool: PoolOption,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Recipe {
    /// Debian 12 with PostgreSQL, and the program that runs jobs. It boots by itself, with BIOS and UEFI
    Debian,
}

impl Recipe {
    /// In the sources, and where the package has it.
    fn places(self) -> Vec<PathBuf> {
        let Self::Debian = self;
        let own = std::env::current_exe().ok();
        let beside = own.and_then(|own| Some(own.parent()?.join("../../guest/image/cached")));
        beside.into_iter().chain([PathBuf::from("/usr/share/perigee/image/cached")]).collect()
    }
}

impl Build {
    /// Builds the image, unless it was built before, and returns the file of its disk.
    pub async fn disk(&self) -> Result<PathBuf, Problem> {
        let what = "can't build the image";
        let next = "install Perigee's package, or run scripts/golden-image in its sources";
        let recipe = first(&self.recipe.places()).map_err(|why| {
            Problem::unavailable(what, format!("there is no recipe: {why}")).next(next)
        })?;
        let runner = first(&perigee_controller::runner_places()).map_err(|why| {
            Problem::unavailable(what, format!("there is no program perigee-runner: {why}"))
                .next(next)
        })?;
        let mut command = Command::new(&recipe);
        if let [_, ..] = &self.also[..] {
            command.arg("--also").arg(self.also.join(","));
        }
        // What it does is on the standard error.
        command.arg(runner).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let cannot_run =
            |error| Problem::unavailable(what, format!("can't run {}: {error}", recipe.display()));
        let ended = command.spawn().map_err(cannot_run)?.wait_with_output().await;
        let ended = ended.map_err(cannot_run)?;
        if !ended.status.success() {
            let why = format!("{} has failed ({})", recipe.display(), ended.status);
            return Err(Problem::unavailable(what, why).next("its messages above say why"));
        }
        let directory = String::from_utf8_lossy(&ended.stdout).trim().to_owned();
        Ok(Path::new(&directory).join("debian-pg.raw"))
    }
}

fn first(places: &[PathBuf]) -> Result<PathBuf, String> {
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    found.ok_or_else(|| {
        let names: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        format!("it is none of {}", names.join(", "))
    })
}
