//! The images of the host made of memory.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use axum::extract::{Path, Query, Request, State};
use perigee_http::{Failure, Json, Reply};
use perigee_model::volume::{
    ContentDigest, CopyImage, DeletedImage, ImageInfo, ImageSource, ImportImage, Step, TREE_PREFIX,
    Upload,
};
use perigee_model::{ImageName, LayerId, Problem};
use serde::Deserialize;

use super::Shared;

pub fn image() -> ImageInfo {
    ImageInfo {
        name: ImageName::new("debian").expect("name"),
        layer: LayerId(uuid::Uuid::nil()),
        size_bytes: 1 << 30,
        allocated_bytes: 300 << 20,
        chain: Vec::new(),
        children: 0,
        remote: None,
        content: None,
        leave_site: Default::default(),
        note: String::new(),
    }
}

pub async fn images(State(inside): Shared) -> Reply<Vec<ImageInfo>> {
    let mut inside = inside.lock().expect("lock");
    inside.lists_of_images += 1;
    let children = inside.image_children;
    Ok(Json(inside.images.values().map(|info| ImageInfo { children, ..info.clone() }).collect()))
}

pub async fn one_image(State(inside): Shared, Path(name): Path<ImageName>) -> Reply<ImageInfo> {
    let inside = inside.lock().expect("lock");
    let info = inside.images.get(&name).cloned();
    let info = info.ok_or_else(|| Problem::not_found("image", "there is none"))?;
    Ok(Json(ImageInfo { children: inside.image_children, ..info }))
}

/// A tar that is cut is refused.
pub async fn receive_tree(
    State(inside): Shared,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Upload>, Failure> {
    let cut = |e| Problem::unavailable("take a tree", e);
    let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.map_err(cut)?;
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(&body[..]).entries().expect("a tar") {
        let mut entry = entry.expect("an entry");
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("a file");
        files.insert(entry.path().expect("a path").to_str().expect("text").to_owned(), content);
    }
    while inside.lock().expect("lock").trees_hang {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut inside = inside.lock().expect("lock");
    inside.trees.push(files);
    let source = format!("{TREE_PREFIX}{id}");
    inside.whole_trees.insert(source.clone());
    if inside.loses_trees {
        return Err(Problem::unavailable("take a tree", "the answer is lost").into());
    }
    Ok(Json(Upload { host: None, source, bytes: body.len() as u64 }))
}

pub async fn delete_tree(State(inside): Shared, Path(id): Path<String>) -> Reply<()> {
    inside.lock().expect("lock").whole_trees.remove(&format!("{TREE_PREFIX}{id}"));
    Ok(Json(()))
}

/// Takes its time, so that two at once meet.
pub async fn import_image(
    State(inside): Shared,
    Json(new): Json<ImportImage>,
) -> Result<String, Failure> {
    tokio::time::sleep(Duration::from_millis(50)).await;
    while inside.lock().expect("lock").imports_hang {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let layer = new.layer.expect("the controller names the layer");
    let info = ImageInfo { name: new.name.clone(), layer, ..image() };
    let mut inside = inside.lock().expect("lock");
    inside.imports += 1;
    if inside.refuses_imports {
        return Err(Problem::not_found("import", "there is no such file").into());
    }
    let step = |step: Step<ImageInfo>| serde_json::to_string(&step).expect("JSON") + "\n";
    if inside.has_silent_sources {
        return Ok(step(Step::Failed(Problem::unavailable("import", "its source is silent"))));
    }
    if let Some(present) = inside.images.get(&new.name) {
        assert_eq!(present.layer, layer, "an import that is asked for again has the same layer");
    }
    let is_tree = new.source.starts_with(TREE_PREFIX) && !inside.images.contains_key(&new.name);
    if is_tree && !inside.whole_trees.remove(&new.source) {
        return Err(Problem::not_found("import", "there is no such tree").into());
    }
    inside.images.insert(new.name, info.clone());
    if inside.loses_answers {
        return Err(Problem::unavailable("import", "the answer is lost").into());
    }
    Ok(step(Step::Done(info)))
}

pub async fn copy_image(
    State(inside): Shared,
    Path(name): Path<ImageName>,
    Json(ask): Json<CopyImage>,
) -> Reply<ImageInfo> {
    while inside.lock().expect("lock").copies_hang {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut inside = inside.lock().expect("lock");
    let layer = ask.layer.expect("the controller names the layer");
    let remote = ImageSource {
        nbd_addr: ask.nbd_addr.clone(),
        export: ask.export.clone().unwrap_or_else(|| format!("image:{name}")),
        keep: ask.keep,
        missing_bytes: 1000,
        failed: None,
        refused: false,
        unclear: false,
    };
    let content = ask.content;
    let is_refused = inside.refuses_source.as_ref() == Some(&ask.nbd_addr);
    inside.copied.push(ask);
    if is_refused {
        return Err(Problem::unavailable("copy the image", "the other host is stuck").into());
    }
    let remote = Some(remote);
    let info = ImageInfo { name: name.clone(), layer, remote, content, ..image() };
    inside.images.insert(name, info.clone());
    Ok(Json(info))
}

#[derive(Deserialize)]
pub struct OnlyBad {
    bad_copy_of: Option<LayerId>,
    unless: Option<ContentDigest>,
}

pub async fn delete_image(
    State(inside): Shared,
    Path(name): Path<ImageName>,
    Query(OnlyBad { bad_copy_of, unless }): Query<OnlyBad>,
) -> Reply<DeletedImage> {
    let mut inside = inside.lock().expect("lock");
    let Some(info) = inside.images.get(&name) else {
        return Err(Problem::not_found("delete the image", "there is none").into());
    };
    if bad_copy_of.is_some_and(|layer| info.layer != layer || !info.is_bad(unless)) {
        return Err(Problem::conflict("delete the image", "it is good by now").into());
    }
    if inside.image_children > 0 {
        return Err(Problem::conflict("delete the image", "a volume stands on it").into());
    }
    inside.images.remove(&name);
    Ok(Json(DeletedImage::default()))
}
