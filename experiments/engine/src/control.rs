//! A client for the volume server's control API.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use perigee_http::Client;
use perigee_model::volume::{
    CreateVolume, CreateVolumes, ImageInfo, ImportImage, PoolInfo, Snapshot, VolumeInfo,
    VolumeSource,
};
use tokio::runtime::Runtime;

pub struct Control {
    client: Client,
    runtime: Runtime,
}

impl Control {
    pub fn new(pool: &Path) -> Result<Self> {
        let address = format!("unix:{}", pool.join("control.sock").display());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { client: Client::new(&address, Duration::from_secs(120))?, runtime })
    }

    pub fn answers(&self) -> bool {
        self.runtime.block_on(self.client.get::<PoolInfo>("/v1/pool")).is_ok()
    }

    pub fn import(&self, image: &str, file: &Path) -> Result<()> {
        let source = file.display().to_string();
        let (name, leave_site) = (image.parse()?, Default::default());
        let body = ImportImage { name, source, format: None, layer: None, leave_site };
        let _: ImageInfo =
            self.runtime.block_on(self.client.post_long("/v1/images", &body, |_| {}))?;
        Ok(())
    }

    pub fn create(
        &self,
        volume: &str,
        source: VolumeSource,
        size_bytes: Option<u64>,
    ) -> Result<()> {
        let body = CreateVolume::new(volume.parse()?, size_bytes, source);
        let _: VolumeInfo = self.runtime.block_on(self.client.post("/v1/volumes", &body))?;
        Ok(())
    }

    /// Creates many clones of one image with one call.
    pub fn create_clones(&self, prefix: &str, count: u32, image: &str) -> Result<()> {
        let names = (0..count).map(|number| format!("{prefix}-{number}").parse());
        let body = CreateVolumes {
            names: names.collect::<Result<_, _>>()?,
            size_bytes: None,
            source: VolumeSource::Image(image.parse()?),
            tenant: Default::default(),
            cache: Default::default(),
            owner: None,
            leave_site: Default::default(),
        };
        let _: Vec<VolumeInfo> =
            self.runtime.block_on(self.client.post("/v1/batch/volumes", &body))?;
        Ok(())
    }

    pub fn snapshot(&self, volume: &str, image: &str) -> Result<()> {
        let path = format!("/v1/volumes/{volume}/snapshot");
        let body = Snapshot { image: image.parse()? };
        let _: ImageInfo = self.runtime.block_on(self.client.post(&path, &body))?;
        Ok(())
    }

    pub fn delete(&self, volume: &str) -> Result<()> {
        Ok(self.runtime.block_on(self.client.delete(&format!("/v1/volumes/{volume}")))?)
    }
}
