//! What the contents of images are, or have to be.

use perigee_model::volume::ContentDigest;
use perigee_model::{ImageName, LayerId};
use rusqlite::{OptionalExtension, params};

use crate::catalog::columns::{optional_parsed, parsed};
use crate::catalog::{Catalog, Result};

/// Why a copy that was not the image's content is not completed from its source any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The source serves something else: all of it came from there, and is what the source says that it has.
    Deceit,
    /// It may also be another host, or the disk here.
    Unclear,
}

impl Catalog {
    /// What a layer shows, or, of a copy that is not complete, what it has to show.
    pub(crate) fn content(&self, layer: LayerId) -> Result<Option<ContentDigest>> {
        self.lock()
            .prepare_cached("SELECT content FROM layers WHERE id = ?1")?
            .query_row([layer.to_string()], |row| optional_parsed(row, 0))
            .optional()
            .map(Option::flatten)
    }

    /// Records what a copy has to show when it is complete.
    pub(crate) fn set_content(&self, layer: LayerId, content: ContentDigest) -> Result<()> {
        let sql = "UPDATE layers SET content = ?2 WHERE id = ?1";
        self.lock().execute(sql, params![layer.to_string(), content.to_string()]).map(drop)
    }

    /// Records what a complete layer was found to show. What is known already stays, and so does what a copy has to show: the
    /// layer may have been deleted and copied again meanwhile.
    pub(crate) fn found_content(&self, layer: LayerId, content: ContentDigest) -> Result<()> {
        let sql = "UPDATE layers SET content = ?2 WHERE id = ?1 AND content IS NULL
                   AND NOT EXISTS (SELECT 1 FROM remote_parents WHERE layer = ?1)";
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

    /// Records that a copy is not completed from its source.
    pub(crate) fn refuse_source(&self, layer: LayerId, verdict: Verdict) -> Result<()> {
        let sql = "UPDATE remote_parents SET refused = ?2 WHERE layer = ?1";
        let refused = match verdict {
            Verdict::Deceit => 1,
            Verdict::Unclear => 2,
        };
        self.lock().execute(sql, params![layer.to_string(), refused]).map(drop)
    }

    /// Records that a copy, which has nothing now, is completed from its source all the same.
    pub(crate) fn try_source_again(&self, layer: LayerId) -> Result<()> {
        let sql = "UPDATE remote_parents SET refused = 0 WHERE layer = ?1";
        self.lock().execute(sql, [layer.to_string()]).map(drop)
    }

    /// Why a copy is not completed from its source, if that is so.
    pub(crate) fn refused_source(&self, layer: LayerId) -> Result<Option<Verdict>> {
        let sql = "SELECT refused FROM remote_parents WHERE layer = ?1";
        let refused = self
            .lock()
            .prepare_cached(sql)?
            .query_row([layer.to_string()], |row| row.get::<_, i64>(0))
            .optional()?;
        Ok(match refused {
            None | Some(0) => None,
            Some(1) => Some(Verdict::Deceit),
            Some(_) => Some(Verdict::Unclear),
        })
    }

    /// Whether all that a copy has came from its present source.
    pub(crate) fn is_of_one_source(&self, layer: LayerId) -> Result<bool> {
        let sql = "SELECT EXISTS (SELECT 1 FROM remote_parents WHERE layer = ?1 AND one_source)";
        self.lock().prepare_cached(sql)?.query_row([layer.to_string()], |row| row.get(0))
    }

    /// Records that a copy has nothing now. The caller keeps others from changing its source meanwhile.
    pub(crate) fn begin_with_one_source(&self, layer: LayerId) -> Result<()> {
        let sql = "UPDATE remote_parents SET one_source = 1 WHERE layer = ?1";
        self.lock().execute(sql, [layer.to_string()]).map(drop)
    }
}
