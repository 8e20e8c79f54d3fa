//! What the contents of images are, or have to be.

use perigee_model::volume::ContentDigest;
use perigee_model::{ImageName, LayerId};
use rusqlite::{OptionalExtension, params};

use super::columns::{optional_parsed, parsed};
use super::{Catalog, Result};

impl Catalog {
    /// What a layer shows, or, of a copy that is not complete, what it has to show.
    pub(crate) fn content(&self, layer: LayerId) -> Result<Option<ContentDigest>> {
        self.lock()
            .prepare_cached("SELECT content FROM layers WHERE id = ?1")?
            .query_row([layer.to_string()], |row| optional_parsed(row, 0))
            .optional()
            .map(Option::flatten)
    }

    pub(crate) fn set_content(&self, layer: LayerId, content: ContentDigest) -> Result<()> {
        let sql = "UPDATE layers SET content = ?2 WHERE id = ?1";
        self.lock().execute(sql, params![layer.to_string(), content.to_string()]).map(drop)
    }

    /// The images whose content is not known, each with its layer.
    pub(crate) fn images_without_content(&self) -> Result<Vec<(ImageName, LayerId)>> {
        let sql = "SELECT name, layer FROM images JOIN layers ON id = layer
                   WHERE content IS NULL ORDER BY name";
        self.lock()
            .prepare_cached(sql)?
            .query_map([], |row| Ok((parsed(row, 0)?, parsed(row, 1)?)))?
            .collect()
    }

    /// Records that a copy has got other content from its source than the image's, so that it is not completed from there.
    pub(crate) fn refuse_source(&self, layer: LayerId) -> Result<()> {
        let sql = "UPDATE remote_parents SET refused = 1 WHERE layer = ?1";
        self.lock().execute(sql, [layer.to_string()]).map(drop)
    }

    pub(crate) fn has_refused_source(&self, layer: LayerId) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM remote_parents WHERE layer = ?1 AND refused)";
        self.lock().prepare_cached(sql)?.query_row([layer.to_string()], |row| row.get(0))
    }
}
