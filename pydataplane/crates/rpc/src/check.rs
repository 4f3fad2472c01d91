//! Checks parameters against a method's schema, so that each fault is one sentence that names the
//! parameter.

use crate::code::Error;
use serde_json::{Map, Value};

/// Largest magnitude below which every integer is a float too (2^53).
const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_992.0;

/// Checks `params` of `method` against the JSON Schema `schema` of its parameters: none unknown,
/// none missing, all of the right type. Integral floats become integers, as in SPDK's decoder.
/// What is wrong with one of the `secrets` is said without its value.
pub fn params(
    method: &str,
    schema: &Value,
    secrets: &[&str],
    params: &mut Map<String, Value>,
) -> Result<(), Error> {
    let empty = Map::new();
    let known = schema["properties"].as_object().unwrap_or(&empty);
    for (name, value) in params.iter_mut() {
        let Some(expected) = known.get(name) else {
            let takes = if known.is_empty() {
                "it takes none".into()
            } else {
                format!("it takes {}", list(known.keys().map(String::as_str)))
            };
            return Err(Error::params(format!(
                "unknown parameter \"{name}\" of {method}; {takes}"
            )));
        };
        normalise(expected, value);
        if !fits(expected, value) {
            if secrets.contains(&name.as_str()) {
                return Err(Error::params(format!(
                    "parameter \"{name}\" of {method} must be {}",
                    describe(expected)
                )));
            }
            return Err(Error::params(format!(
                "parameter \"{name}\" of {method} must be {}, not {}",
                describe(expected),
                shown(value)
            )));
        }
    }
    let required = schema["required"].as_array().into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if !params.contains_key(name) {
            return Err(Error::params(format!(
                "missing parameter \"{name}\" of {method}: {}",
                describe(&known[name])
            )));
        }
    }
    Ok(())
}

/// The integral float that some clients send for an integer, as an integer.
fn normalise(schema: &Value, value: &mut Value) {
    if !types(schema).any(|t| t == "integer") || value.is_u64() || value.is_i64() {
        return;
    }
    if let Some(f) = value.as_f64()
        && f.fract() == 0.0
        && f.abs() < MAX_SAFE_INTEGER
    {
        *value = Value::from(f as i64);
    }
}

/// Whether `value` is of one of the schema's types, in its range and among its constants.
fn fits(schema: &Value, value: &Value) -> bool {
    for key in ["anyOf", "oneOf"] {
        if let Some(choices) = schema[key].as_array() {
            return choices.iter().any(|choice| fits(choice, value));
        }
    }
    if let Some(constant) = schema.get("const") {
        return constant == value;
    }
    if let Some(choices) = schema["enum"].as_array() {
        return choices.contains(value);
    }
    let mut any_type = true;
    for t in types(schema) {
        any_type = false;
        let fits = match t {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "string" if schema["format"] == "uuid" => value.as_str().is_some_and(is_uuid),
            "string" => value.is_string(),
            "object" => value.is_object(),
            "number" => value.is_number(),
            "integer" => (value.is_u64() || value.is_i64()) && in_range(schema, value),
            "array" => value
                .as_array()
                .is_some_and(|items| items.iter().all(|item| fits(&schema["items"], item))),
            _ => false,
        };
        if fits {
            return true;
        }
    }
    any_type
}

/// Eight, four, four, four and twelve hexadecimal digits with dashes between (RFC 9562 section 4).
fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}

fn in_range(schema: &Value, value: &Value) -> bool {
    let value = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    let (low, high) = range(schema);
    value.is_some_and(|v| (low..=high).contains(&v))
}

/// The bounds of an integer schema: its own, within those of its format.
fn range(schema: &Value) -> (i128, i128) {
    let (low, high) = match schema["format"].as_str() {
        Some("uint8") => (0, i128::from(u8::MAX)),
        Some("uint16") => (0, i128::from(u16::MAX)),
        Some("uint32") => (0, i128::from(u32::MAX)),
        Some("int32") => (i128::from(i32::MIN), i128::from(i32::MAX)),
        Some("int64") => (i128::from(i64::MIN), i128::from(i64::MAX)),
        _ => (0, i128::from(u64::MAX)),
    };
    let bound = |key: &str| schema[key].as_i64().map(i128::from);
    (bound("minimum").unwrap_or(low).max(low), bound("maximum").unwrap_or(high).min(high))
}

fn types(schema: &Value) -> impl Iterator<Item = &str> {
    let t = &schema["type"];
    t.as_str().into_iter().chain(t.as_array().into_iter().flatten().filter_map(Value::as_str))
}

/// What the schema wants, as a noun phrase.
fn describe(schema: &Value) -> String {
    let constants = constants(schema);
    if !constants.is_empty() {
        return format!("one of {}", list(constants.iter().map(String::as_str)));
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(choices) = schema[key].as_array() {
            let nouns: Vec<_> =
                choices.iter().filter(|c| c["type"] != "null").map(describe).collect();
            return nouns.join(" or ");
        }
    }
    let nouns: Vec<_> = types(schema)
        .filter(|t| *t != "null")
        .map(|t| match t {
            "integer" => {
                let (low, high) = range(schema);
                format!("an integer from {low} to {high}")
            }
            "array" => format!("an array ({} each)", describe(&schema["items"])),
            "object" => "an object".into(),
            "string" if schema["format"] == "uuid" => "a UUID".into(),
            "boolean" => "true or false".into(),
            other => format!("a {other}"),
        })
        .collect();
    if nouns.is_empty() { "any value".into() } else { nouns.join(" or ") }
}

/// The constants that a schema allows, if that is what it is made of.
fn constants(schema: &Value) -> Vec<String> {
    if let Some(constant) = schema.get("const") {
        return vec![shown(constant)];
    }
    if let Some(choices) = schema["enum"].as_array() {
        return choices.iter().filter(|c| !c.is_null()).map(shown).collect();
    }
    ["anyOf", "oneOf"]
        .iter()
        .filter_map(|key| schema[*key].as_array())
        .flatten()
        .flat_map(constants)
        .collect()
}

/// Longest value quoted in a message, in characters.
const MAX_SHOWN: usize = 64;

fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= MAX_SHOWN {
        return text;
    }
    let start: String = text.chars().take(MAX_SHOWN).collect();
    format!("{start}...")
}

/// Names as people list them.
fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(given: Value) -> Result<Value, String> {
        let schema = json!({
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer", "format": "uint64", "minimum": 0},
                "target": {"type": ["integer", "null"], "format": "int32"},
                "thin": {"type": ["boolean", "null"]},
                "uuid": {"type": ["string", "null"], "format": "uuid"},
                "names": {"type": ["array", "null"], "items": {"type": "string"}},
                "mode": {"anyOf": [{"type": "string", "enum": ["all", "none"]}, {"type": "null"}]},
            },
            "required": ["name"],
        });
        let mut given = given.as_object().unwrap().clone();
        params("m", &schema, &[], &mut given).map(|()| given.into()).map_err(|e| e.message)
    }

    #[test]
    fn what_fits_passes_and_integral_floats_become_integers() {
        let given = json!({"name": "a", "size": 2.0, "target": -1, "thin": null, "mode": "all",
                           "names": ["a"]});
        let mut expected = given.clone();
        expected["size"] = json!(2);
        assert_eq!(check(given), Ok(expected));
        assert_eq!(check(json!({"name": "a", "mode": null})).map(|_| ()), Ok(()));
        let largest = json!({"name": "a", "size": u64::MAX});
        assert_eq!(check(largest.clone()), Ok(largest));
    }

    #[test]
    fn each_fault_is_a_sentence_that_names_the_parameter() {
        for (given, sentence) in [
            (json!({}), "missing parameter \"name\" of m: a string"),
            (
                json!({"name": "a", "nmae": 1}),
                "unknown parameter \"nmae\" of m; it takes mode, name, names, size, target, thin, uuid",
            ),
            (json!({"name": 7}), "parameter \"name\" of m must be a string, not 7"),
            (
                json!({"name": "a", "size": -1}),
                "parameter \"size\" of m must be an integer from 0 to 18446744073709551615, not -1",
            ),
            (
                json!({"name": "a", "size": 1.5}),
                "parameter \"size\" of m must be an integer from 0 to 18446744073709551615, not 1.5",
            ),
            (
                json!({"name": "a", "target": 3_000_000_000u64}),
                "parameter \"target\" of m must be an integer from -2147483648 to 2147483647, \
                 not 3000000000",
            ),
            (
                json!({"name": "a", "thin": "yes"}),
                "parameter \"thin\" of m must be true or false, not \"yes\"",
            ),
            (
                json!({"name": "a", "names": [1]}),
                "parameter \"names\" of m must be an array (a string each), not [1]",
            ),
            (
                json!({"name": "a", "uuid": "12"}),
                "parameter \"uuid\" of m must be a UUID, not \"12\"",
            ),
            (
                json!({"name": "a", "mode": "some"}),
                "parameter \"mode\" of m must be one of \"all\", \"none\", not \"some\"",
            ),
        ] {
            assert_eq!(check(given).unwrap_err(), sentence);
        }
    }
}
