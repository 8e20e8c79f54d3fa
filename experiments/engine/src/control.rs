//! The volume server's control API, one call after the other.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use perigee_http::Client;
use perigee_model::volume::{
    CreateVolume, ImageInfo, ImportImage, PoolInfo, Snapshot, VolumeInfo, VolumeSource,
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
        let body = ImportImage { name: image.parse()?, source, layer: None };
        let _: ImageInfo = self.runtime.block_on(self.client.post("/v1/images", &body))?;
        Ok(())
    }

    pub fn create(
        &self,
        volume: &str,
        source: VolumeSource,
        size_bytes: Option<u64>,
    ) -> Result<()> {
        let body = CreateVolume { name: volume.parse()?, size_bytes, source };
        let _: VolumeInfo = self.runtime.block_on(self.client.post("/v1/volumes", &body))?;
        Ok(())
    }

    /// Many clones of one image, with 16 calls in flight.
    pub fn create_clones(&self, prefix: &str, count: u32, image: &str) -> Result<()> {
        let image: perigee_model::ImageName = image.parse()?;
        let mut bodies = Vec::new();
        for number in 0..count {
            let name = format!("{prefix}-{number}").parse()?;
            let source = VolumeSource::Image(image.clone());
            bodies.push(CreateVolume { name, size_bytes: None, source });
        }
        self.runtime.block_on(async {
            let queue = std::sync::Arc::new(std::sync::Mutex::new(bodies.into_iter()));
            let mut calls = tokio::task::JoinSet::new();
            for _ in 0..16 {
                let (queue, client) = (queue.clone(), self.client.clone());
                calls.spawn(async move {
                    loop {
                        let body = queue.lock().expect("no holder panics").next();
                        let Some(body) = body else { return Ok(()) };
                        let made = client.post::<VolumeInfo>("/v1/volumes", &body).await;
                        made.map(drop)?;
                    }
                });
            }
            while let Some(ended) = calls.join_next().await {
                let ended: Result<(), perigee_model::Problem> = ended?;
                ended?;
            }
            Ok(())
        })
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
