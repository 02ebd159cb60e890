//! [`MethodSpec`]: a method and its options, as written on a command line.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Method;
use super::table::{self, Options};
use crate::error::{EvalError, Result};

/// A method with options, written `name` or `name:option=value:option=value`, such as `s2o:tau=0.05:segment=1024`.
/// Parsing checks that the method exists; [`MethodSpec::build`] checks the options. A value cannot contain a colon.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MethodSpec {
    name: String,
    options: Vec<(String, String)>,
}

impl MethodSpec {
    /// The name in the table.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value of an option, if it is given.
    pub fn option(&self, option: &str) -> Option<&str> {
        self.options.iter().rev().find(|(name, _)| name == option).map(|(_, value)| value.as_str())
    }

    /// The same method with one option set or replaced.
    pub fn with(mut self, option: &str, value: impl ToString) -> Self {
        self.options.retain(|(name, _)| name != option);
        self.options.push((option.to_owned(), value.to_string()));
        self
    }

    /// Makes the method.
    ///
    /// # Errors
    /// [`EvalError::MethodOption`] for an option that the method lacks or a value that it refuses.
    pub fn build(&self) -> Result<Box<dyn Method>> {
        let mut options = Options { method: &self.name, given: &self.options, known: Vec::new() };
        let method = (table::find(&self.name)?.make)(&mut options)?;
        let Options { known, .. } = &options;
        let Some((name, _)) = self.options.iter().find(|(name, _)| !known.contains(&name.as_str())) else {
            return Ok(method);
        };
        let known = if known.is_empty() { "no options".to_owned() } else { known.join(", ") };
        Err(options.refuse(&format!("expected {known}, got {name}")))
    }
}

impl FromStr for MethodSpec {
    type Err = EvalError;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let name = table::find(parts.next().unwrap_or_default())?.name.to_owned();
        let options = parts
            .map(|part| match part.split_once('=') {
                Some((option, value)) => Ok((option.to_owned(), value.to_owned())),
                None => Err(EvalError::wrong("option of a method", "option=value", part)),
            })
            .collect::<Result<_>>()?;
        Ok(Self { name, options })
    }
}

impl fmt::Display for MethodSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.options.iter().try_for_each(|(option, value)| write!(f, ":{option}={value}"))
    }
}

impl From<MethodSpec> for String {
    fn from(spec: MethodSpec) -> Self {
        spec.to_string()
    }
}

impl TryFrom<String> for MethodSpec {
    type Error = EvalError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_parsed() {
        for text in [
            "dense",
            "s2o",
            "s2o:tau=0.05:segment=1024",
            "s2o-paper:stop-rule=all:score=second-cumulant=0.5:q-perm=off:segment=auto",
            "sliding-window:window=4096",
        ] {
            let spec: MethodSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(serde_json::from_str::<MethodSpec>(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
            spec.build().unwrap();
        }
        let spec: MethodSpec = "s2o:tau=0.05".parse().unwrap();
        assert_eq!((spec.option("tau"), spec.option("segment")), (Some("0.05"), None));
        assert_eq!(spec.with("tau", 0.01).to_string(), "s2o:tau=0.01");
    }

    #[test]
    fn options_are_known_without_a_value() {
        let options = |name| table::find(name).unwrap().options();
        assert!(options("dense").is_empty());
        assert!(options("s2o").contains(&"tau") && options("sliding-window").contains(&"dense-below"));
        for row in table::ALL {
            assert!(row.knob.is_none_or(|knob| row.options().contains(&knob.option)), "{}", row.name);
            let file = row.knob.and_then(|knob| knob.file);
            assert!(file.is_none_or(|file| row.options().contains(&file)), "{}", row.name);
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let parse = |text: &str| text.parse::<MethodSpec>().unwrap_err().to_string();
        assert!(parse("sparse").contains("expected one of dense, s2o"), "{}", parse("sparse"));
        assert_eq!(parse("s2o:tau"), "option of a method: expected option=value, got tau");
        let build = |text: &str| text.parse::<MethodSpec>().unwrap().build().unwrap_err().to_string();
        for (spec, part) in [
            ("s2o:tau=2", "tau"),
            ("s2o:tau=x", "expected `auto` or a number in [0, 1)"),
            (
                "s2o:stop-rule=median",
                "s2o: stop-rule: expected `auto` or `all` or `mean` or `sum` or `max-weight` or `mean-weight`, got \"median\"",
            ),
            ("s2o:tau=0.1:layers=tuned.json", "expected none together with layers"),
            ("s2o:layers=no-such-file", "s2o: no-such-file: "),
            ("sliding-window:threshold=1", "expected window, sink, dense-below, got threshold"),
            ("dense:tau=1", "expected no options, got tau"),
        ] {
            assert!(build(spec).contains(part), "{}", build(spec));
        }
    }
}
