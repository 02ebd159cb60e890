//! [`Options`]: the options of a [`super::MethodSpec`], taken one by one by the method that knows them.

use std::str::FromStr;

use crate::error::{EvalError, Result};

/// Options by name. A method takes those it knows; [`super::MethodSpec::build`] refuses the rest.
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
    /// [`EvalError::WrongInput`] if it does not parse; `expected` says what would.
    pub fn take<T: FromStr>(&mut self, name: &'static str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| self.refuse(&format!("{name}: expected {expected}, got {value}")))
    }

    /// The value of an option as it is written, if it is given.
    pub fn text(&mut self, name: &'static str) -> Option<&'s str> {
        if !self.known.contains(&name) {
            self.known.push(name);
        }
        self.given.iter().rev().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// A number, if it is given.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] if it is none.
    pub fn number(&mut self, name: &'static str) -> Result<Option<f64>> {
        self.take(name, "a number")
    }

    /// A whole number, if it is given.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] if it is none.
    pub fn count(&mut self, name: &'static str) -> Result<Option<usize>> {
        self.take(name, "a whole number")
    }

    /// The error of an option's value that the method refuses.
    pub fn refuse(&self, reason: &impl ToString) -> EvalError {
        EvalError::MethodOption { method: self.method.to_owned(), reason: reason.to_string() }
    }

    /// The options that were asked for.
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
