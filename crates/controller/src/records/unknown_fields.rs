//! Fields of a stored record that this version does not know. A newer version has written them, and is to find them again: until the end of an
//! upgrade the controller may be one of this version or of the next.
//!
//! A field is not known if it is in what is stored, and not in what this version makes of that. So no type of a record has to do anything for it.

use serde::Serialize;
use serde_json::{Map, Value};

/// A stored record that has more than this version knows.
#[derive(Debug, Clone)]
pub struct UnknownFields {
    stored: Value,
    /// What this version makes of it.
    known: Value,
}

impl UnknownFields {
    /// What is stored and was read as `value`; `None` if all of that is known.
    pub fn of<T: Serialize>(stored: Value, value: &T) -> Option<Self> {
        let known = serde_json::to_value(value).ok()?;
        (stored != known).then_some(Self { stored, known })
    }

    /// Adds the fields to what is to be stored instead. What this version has removed takes its unknown fields with it.
    pub fn keep_in(&self, new: &mut Value) {
        keep(&self.stored, &self.known, new);
    }
}

fn keep(stored: &Value, known: &Value, new: &mut Value) {
    if stored == known {
        return;
    }
    match (stored, known, new) {
        (Value::Object(stored), Value::Object(known), Value::Object(new)) => {
            keep_in_map(stored, known, new);
        }
        (Value::Array(stored), Value::Array(known), Value::Array(new))
            if stored.len() == known.len() =>
        {
            keep_in_list(stored, known, new);
        }
        _ => {}
    }
}

fn keep_in_map(
    stored: &Map<String, Value>,
    known: &Map<String, Value>,
    new: &mut Map<String, Value>,
) {
    for (key, was) in stored {
        match known.get(key) {
            Some(known) => {
                if let Some(new) = new.get_mut(key) {
                    keep(was, known, new);
                }
            }
            None => {
                new.entry(key.clone()).or_insert_with(|| was.clone());
            }
        }
    }
}

/// The elements of a list have no names: one is what it was if it is as before, else if most of its fields are.
fn keep_in_list(stored: &[Value], known: &[Value], new: &mut [Value]) {
    let mut left: Vec<usize> = (0..known.len()).collect();
    let mut changed = Vec::new();
    for element in new {
        match left.iter().position(|at| known[*at] == *element) {
            Some(found) => {
                let at = left.remove(found);
                keep(&stored[at], &known[at], element);
            }
            None => changed.push(element),
        }
    }
    for element in changed {
        let alike = |at: &usize| fields_in_common(&known[*at], element);
        let nearest = left.iter().enumerate().filter_map(|(i, at)| Some((alike(at)?, i)));
        if let Some((_, found)) = nearest.max_by_key(|(alike, i)| (*alike, std::cmp::Reverse(*i))) {
            let at = left.remove(found);
            keep(&stored[at], &known[at], element);
        }
    }
}

/// How many fields of two objects are the same; `None` if that is not more than half.
fn fields_in_common(one: &Value, other: &Value) -> Option<usize> {
    let (one, other) = (one.as_object()?, other.as_object()?);
    let same = one.iter().filter(|(key, value)| other.get(*key) == Some(value)).count();
    (2 * same > one.len().max(other.len())).then_some(same)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn kept(stored: Value, known: Value, mut new: Value) -> Value {
        UnknownFields { stored, known }.keep_in(&mut new);
        new
    }

    #[test]
    fn an_element_of_a_list_keeps_its_fields_when_it_is_changed_and_when_others_go() {
        let disk = |volume: &str, epoch: u32| json!({"volume": volume, "epoch": epoch, "home": 1});
        let newer = |volume: &str| json!({"volume": volume, "epoch": 1, "home": 1, "x": volume});
        let stored = json!([newer("a"), newer("b"), newer("c")]);
        let known = json!([disk("a", 1), disk("b", 1), disk("c", 1)]);
        let new = json!([disk("c", 2), disk("b", 1), disk("new", 7)]);
        let mut b = disk("b", 1);
        b["x"] = json!("b");
        let mut c = disk("c", 2);
        c["x"] = json!("c");
        assert_eq!(kept(stored, known, new), json!([c, b, disk("new", 7)]));
    }

    #[test]
    fn what_is_removed_stays_removed() {
        let stored = json!({"a": {"k": 1, "x": 2}, "b": 1, "x": 3});
        let known = json!({"a": {"k": 1}, "b": 1});
        assert_eq!(kept(stored.clone(), known.clone(), json!({"b": 2})), json!({"b": 2, "x": 3}));
        assert_eq!(kept(stored, known, json!({"a": null})), json!({"a": null, "x": 3}));
    }

    /// Names that begin so are those of fields that only the newer version knows.
    const NEWER: char = 'x';

    /// What this version makes of what the newer one has stored.
    fn without_newer(value: &Value) -> Value {
        match value {
            Value::Object(map) => {
                let known = map.iter().filter(|(key, _)| !key.starts_with(NEWER));
                Value::Object(known.map(|(k, v)| (k.clone(), without_newer(v))).collect())
            }
            Value::Array(list) => Value::Array(list.iter().map(without_newer).collect()),
            other => other.clone(),
        }
    }

    /// Each field is as in `stored` if only the newer version knows it, wherever its object is still there.
    fn check_kept(stored: &Value, new: &Value) -> Result<(), TestCaseError> {
        let (Value::Object(stored), Value::Object(new)) = (stored, new) else { return Ok(()) };
        for (key, was) in stored {
            match new.get(key) {
                now if key.starts_with(NEWER) => prop_assert_eq!(now, Some(was), "{}", key),
                Some(now) => check_kept(was, now)?,
                None => {}
            }
        }
        Ok(())
    }

    fn record() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![Just(Value::Null), any::<i8>().prop_map(Value::from)];
        let of = |inner: BoxedStrategy<Value>| {
            let map = prop::collection::btree_map("[a-dxy]", inner.clone(), 0..5);
            let list = prop::collection::vec(inner, 0..4).prop_map(Value::Array);
            prop_oneof![3 => map.prop_map(|map| Value::Object(map.into_iter().collect())), 1 => list]
        };
        leaf.prop_recursive(4, 40, 5, of)
    }

    proptest! {
        /// Whatever this version writes instead: its own fields are as it wants them, and those of the newer version stay.
        #[test]
        fn fields_of_a_newer_version_survive_whatever_this_version_writes(
            stored in record(),
            written in record(),
        ) {
            let (known, written) = (without_newer(&stored), without_newer(&written));
            let new = kept(stored.clone(), known, written.clone());
            prop_assert_eq!(without_newer(&new), written);
            check_kept(&stored, &new)?;
        }

        /// That is so for the elements of lists too.
        #[test]
        fn a_record_that_is_written_as_it_was_read_is_as_it_was(stored in record()) {
            let known = without_newer(&stored);
            prop_assert_eq!(kept(stored.clone(), known.clone(), known), stored);
        }
    }
}
