//! [`Options`]: the options of a [`super::MethodSpec`], which the method reads one at a time.

use std::str::FromStr;

use crate::error::{EvalError, Result};

/// Options by name. A method reads the options that it supports; [`super::MethodSpec::build`] refuses the rest.
#[derive(Debug)]
pub struct Options<'s> {
    method: &'s str,
    given: &'s [(String, String)],
    known: Vec<&'static str>,
}

impl<'s> Options<'s> {
    pub(super) fn new(method: &'s str, given: &'s [(String, String)]) -> Self {
        Self { method, given, known: Vec::new() }
    }

    /// The value of an option, if it is given.
    ///
    /// # Errors
    /// [`EvalError::MethodOption`] if it does not parse. `expected` describes the valid values.
    pub fn take<T: FromStr>(&mut self, name: &'static str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| self.refuse(&format!("{name}: expected {expected}, got {value}")))
    }

    /// The text of an option, if it is given.
    pub fn text(&mut self, name: &'static str) -> Option<&'s str> {
        if !self.known.contains(&name) {
            self.known.push(name);
        }
        self.given.iter().rev().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// An option that is a number, if it is given.
    ///
    /// # Errors
    /// [`EvalError::MethodOption`] if it is not a number.
    pub fn number(&mut self, name: &'static str) -> Result<Option<f64>> {
        self.take(name, "a number")
    }

    /// An option that is a whole number, if it is given.
    ///
    /// # Errors
    /// [`EvalError::MethodOption`] if it is not a whole number.
    pub fn count(&mut self, name: &'static str) -> Result<Option<usize>> {
        self.take(name, "a whole number")
    }

    /// The error for an option value that the method refuses.
    pub fn refuse(&self, reason: &impl ToString) -> EvalError {
        EvalError::MethodOption { method: self.method.to_owned(), reason: reason.to_string() }
    }

    /// The options that the method has read.
    pub(super) fn known(self) -> Vec<&'static str> {
        self.known
    }

    pub(super) fn finish(self) -> Result<()> {
        let unknown = self.given.iter().map(|(name, _)| name).find(|name| !self.known.contains(&name.as_str()));
        let Some(name) = unknown else { return Ok(()) };
        let known = match self.known.as_slice() {
            [] => "no options".to_owned(),
            known => known.join(", "),
        };
        Err(self.refuse(&format!("expected {known}, got {name}")))
    }
}
